"""Histogram arithmetic against numbers worked out by hand from Prometheus' rules; test_prometheus asks the server."""

import math

import pytest

from kvctl.metrics.histogram import Histogram

INF = math.inf


def make(bounds, counts, total=None):
    cumulative, seen = [], 0.0
    for count in counts:
        seen += count
        cumulative.append(seen)
    return Histogram(tuple(bounds), tuple(cumulative), total, seen)


@pytest.mark.parametrize(
    ("q", "value", "low", "high"),
    [
        (0.0, 0.0, 0.0, 1.0),
        (0.25, 1.0, 0.0, 1.0),  # rank 5 of 5 in the first bucket
        (0.5, 1.5, 1.0, 2.0),  # rank 10: the 5th of 10
        (0.75, 2.0, 1.0, 2.0),
        (0.8, 2.4, 2.0, 4.0),  # rank 16: the 1st of 5
        (1.0, 4.0, 2.0, 4.0),
    ],
)
def test_a_quantile_is_linear_inside_its_bucket_and_names_the_bucket(q, value, low, high):
    quantile = make([1.0, 2.0, 4.0, INF], [5, 10, 5, 0]).quantile(q)
    assert quantile.value == pytest.approx(value)
    assert (quantile.low, quantile.high) == (low, high)


def test_above_the_last_bound_only_the_bound_is_known():
    quantile = make([1.0, 2.0, INF], [1, 1, 8]).quantile(0.99)
    assert quantile == (2.0, 2.0, INF)


def test_a_first_bound_that_is_not_positive_has_no_lower_end():
    assert make([-1.0, 2.0, INF], [5, 5, 0]).quantile(0.2) == (-1.0, -INF, -1.0)


@pytest.mark.parametrize(
    "histogram",
    [
        make([1.0, INF], [0, 0]),
        make([1.0, 2.0], [3, 4]),  # no +Inf bucket
        make([INF], [3]),
        Histogram((), (), 1.0, 3.0),
    ],
)
def test_where_prometheus_says_nan_there_is_no_quantile(histogram):
    assert histogram.quantile(0.5) is None


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_q_outside_0_to_1_has_no_quantile(q):
    assert make([1.0, INF], [3, 0]).quantile(q) is None


def test_counts_that_fall_are_raised_before_use():
    crooked = Histogram((1.0, 2.0, 4.0, INF), (5.0, 3.0, 9.0, 10.0), None, 10.0)
    straight = Histogram((1.0, 2.0, 4.0, INF), (5.0, 5.0, 9.0, 10.0), None, 10.0)
    for q in (0.1, 0.5, 0.7, 0.9):
        assert crooked.quantile(q) == straight.quantile(q)


def test_a_difference_counts_only_what_came_since():
    before, after = make([1.0, INF], [4, 1], 3.0), make([1.0, INF], [4, 7], 21.0)
    since = after.since(before)
    assert (since.cumulative, since.count, since.mean) == ((0.0, 6.0), 6.0, 3.0)
    assert after.since(None) is None


def test_after_a_restart_everything_is_new():
    before, after = make([1.0, INF], [40, 10], 30.0), make([1.0, INF], [2, 0], 1.0)
    assert after.since(before) == after


def test_other_bounds_cannot_be_compared_or_added():
    one, other = make([1.0, INF], [1, 1]), make([2.0, INF], [1, 1])
    assert one.since(other) is None
    assert one.plus(other) is None


def test_two_histograms_add_bucket_by_bucket():
    both = make([1.0, INF], [1, 2], 5.0).plus(make([1.0, INF], [3, 4], 7.0))
    assert (both.cumulative, both.sum, both.count) == ((4.0, 10.0), 12.0, 10.0)


def test_the_mean_is_exact_or_missing():
    assert make([1.0, INF], [1, 1], 5.0).mean == 2.5
    assert make([1.0, INF], [0, 0], 0.0).mean is None
    assert make([1.0, INF], [1, 1], None).mean is None


def test_the_top_bucket_is_the_highest_one_used():
    steps = make([8.0, 64.0, 2048.0, 4096.0, INF], [0, 90, 0, 10, 0], 90 * 36 + 10 * 2100.0)
    low, high, share = steps.top_bucket()
    assert (low, high) == (2048.0, 4096.0)
    assert share == pytest.approx(0.1)
    assert steps.top_bucket_mean() == pytest.approx(2100.0)
    assert make([1.0, INF], [0, 0]).top_bucket() is None


def test_the_share_above_a_bound():
    steps = make([8.0, 64.0, INF], [2, 6, 2])
    assert steps.share_above(8.0) == pytest.approx(0.8)
    assert steps.share_above(64.0) == pytest.approx(0.2)
    assert make([8.0, INF], [0, 0]).share_above(8.0) is None
