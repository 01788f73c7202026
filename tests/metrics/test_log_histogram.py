"""The histogram of gaps, against numpy on the raw values."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.metrics.log_histogram import LogHistogram, bucket_value_s, gap_bucket
from kvctl.metrics.summary import LatencySummary


@given(st.floats(1.1e-6, 1e4))
def test_a_value_is_known_to_a_fortieth_of_a_percent(value):
    assert bucket_value_s(gap_bucket(value)) == pytest.approx(value, rel=2.6e-4)


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 99.9, 100])
def test_percentiles_are_those_of_the_values(percent):
    values = np.random.default_rng(2).lognormal(-4, 0.7, 20_000)
    histogram = LogHistogram()
    histogram.add(values)
    assert histogram.percentile_s(percent) == pytest.approx(np.percentile(values, percent), rel=6e-4)
    assert histogram.mean_s == pytest.approx(values.mean(), rel=1e-12)


@given(st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.05, 1.0]), min_size=1, max_size=30), st.floats(0, 100))
def test_few_values_interpolate_as_numpy_does(values, percent):
    histogram = LogHistogram()
    histogram.add(values)
    assert histogram.percentile_s(percent) == pytest.approx(np.percentile(values, percent), rel=6e-4, abs=1e-9)


def test_merging_is_adding():
    first, second, both = LogHistogram(), LogHistogram(), LogHistogram()
    first.add([0.001, 0.5])
    second.add([0.02])
    both.add([0.001, 0.5, 0.02])
    first.merge(second)
    assert list(first.cumulative()) == list(both.cumulative())
    assert first.sum_s == pytest.approx(both.sum_s)


def test_events_of_one_read_are_gaps_of_zero():
    histogram = LogHistogram()
    histogram.add_buckets(array("H", [gap_bucket(0.0), gap_bucket(0.04)]), 0.04)
    assert histogram.percentile_s(0) == 0.0
    assert LatencySummary.of_histogram(histogram).max_s == pytest.approx(0.04, rel=3e-4)


def test_an_empty_histogram_says_nothing():
    assert LogHistogram().percentile_s(50) is None
    assert LogHistogram().mean_s is None
    assert LatencySummary.of_histogram(LogHistogram()).n == 0


def test_absurd_durations_stay_in_the_last_bucket():
    assert gap_bucket(1e300) == 65_535
