"""Percentiles, intervals and goodput, against numpy and scipy."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvctl.errors import ConfigError
from kvctl.metrics.summary import (
    Goodput,
    LatencySummary,
    Slo,
    bootstrap_ratios,
    percentile,
    percentile_interval,
    samples_needed,
    sketch,
    wilson_interval,
)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0, 100))
def test_percentile_is_numpys(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


def test_mean_and_deviation_are_numpys():
    rng = np.random.default_rng(1)
    values = rng.gamma(2.0, 0.05, 500)
    summary = LatencySummary.of(list(values))
    assert summary.mean_s == pytest.approx(values.mean())
    assert summary.std_s == pytest.approx(values.std())
    assert summary.percentile_s(99) == pytest.approx(np.percentile(values, 99))


@pytest.mark.parametrize(("percent", "needed"), [(50, 1), (90, 10), (95, 20), (99, 100)])
def test_a_percentile_is_refused_when_it_would_only_be_the_maximum(percent, needed):
    assert samples_needed(percent) == needed
    assert LatencySummary.of([1.0] * needed).percentile_s(percent) == 1.0
    if needed > 1:
        assert LatencySummary.of([1.0] * (needed - 1)).percentile_s(percent) is None


def test_nothing_measured_is_none_and_not_zero():
    told = LatencySummary.of([]).as_json_ms()
    assert told["n"] == 0
    assert all(value is None for name, value in told.items() if name != "n")


@pytest.mark.parametrize(("good", "total"), [(0, 10), (10, 10), (3, 7), (950, 1000), (1, 100_000)])
def test_wilson_interval_is_scipys(good, total):
    expected = stats.binomtest(good, total).proportion_ci(0.95, method="wilson")
    assert wilson_interval(good, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_no_requests_give_no_interval():
    assert wilson_interval(0, 0) is None
    assert Goodput(0, 0, 0.0, Slo({"ttft": 1.0})).as_json()["share"] is None


@pytest.mark.parametrize(("n", "percent"), [(30, 50), (200, 90), (1000, 99), (700, 99)])
def test_percentile_interval_is_scipys_quantile_test(n, percent):
    values = np.sort(np.random.default_rng(n).exponential(size=n))
    expected = stats.quantile_test(values, p=percent / 100).confidence_interval(0.95)
    assert percentile_interval(list(values), percent) == pytest.approx((expected.low, expected.high))


def test_percentile_interval_needs_enough_samples():
    assert percentile_interval([1.0, 2.0, 3.0], 99) is None
    assert percentile_interval([], 50) is None


def test_percentile_interval_covers_the_truth_at_least_as_often_as_promised():
    rng = random.Random(4)
    truth = math.log(2)  # median of the unit exponential
    hits = 0
    for _ in range(400):
        low, high = percentile_interval(sorted(rng.expovariate(1) for _ in range(60)), 50)
        hits += low <= truth <= high
    assert hits / 400 > 0.93


def test_bootstrap_sees_a_real_difference_and_no_false_one():
    rng = random.Random(7)
    base = [rng.gauss(100, 10) for _ in range(400)]
    same = [rng.gauss(100, 10) for _ in range(400)]
    slower = [value * 1.2 for value in same]
    [(ratio, low, high)] = bootstrap_ratios(base, same, [50], rounds=300)
    assert low < 1 < high
    assert ratio == pytest.approx(1, abs=0.03)
    [(ratio, low, high)] = bootstrap_ratios(base, slower, [50], rounds=300)
    assert low > 1.1
    assert bootstrap_ratios([], base, [50, None]) == [None, None]
    assert bootstrap_ratios([0.0], base, [50]) == [None]


def test_bootstrap_interval_is_near_scipys():
    rng = np.random.default_rng(3)
    before, after = rng.gamma(5, 10, 300), rng.gamma(5, 11, 300)
    [(_, low, high)] = bootstrap_ratios(list(before), list(after), [None], rounds=1500)
    found = stats.bootstrap(
        (after, before), lambda a, b, axis: a.mean(axis) / b.mean(axis), method="percentile", rng=1, n_resamples=1500
    ).confidence_interval
    assert (low, high) == pytest.approx((found.low, found.high), abs=0.02)


def test_sketch_keeps_the_distribution():
    values = np.random.default_rng(5).lognormal(size=50_000)
    kept = sketch(list(values), 2000)
    assert len(kept) == 2000
    for percent in (5, 50, 95, 99):
        assert np.percentile(kept, percent) == pytest.approx(np.percentile(values, percent), rel=0.02)
    assert sketch([3.0, 1.0]) == [1.0, 3.0]


def test_slo_reads_other_tools_names():
    assert Slo.parse("ttft=500ms,tpot=50ms,e2el:2s").limits_s == {"ttft": 0.5, "tpot": 0.05, "e2e": 2.0}
    assert str(Slo.parse("itl=50ms")) == "tpot=50ms"


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "speed=3ms", "ttft=-3ms", "ttft=abc"])
def test_a_wrong_slo_is_refused(text):
    with pytest.raises(ConfigError):
        Slo.parse(text)


def test_a_limit_on_what_a_request_does_not_have_is_kept():
    slo = Slo.parse("ttft=100ms,tpot=10ms")
    assert slo.is_met({"ttft": 0.1, "tpot": None})
    assert not slo.is_met({"ttft": 0.1001, "tpot": None})
    assert not slo.is_met({"ttft": None, "tpot": None})  # an answer without a token


def test_goodput_counts_failures_as_misses():
    told = Goodput(90, 100, 10.0, Slo.parse("ttft=1s")).as_json()
    assert told["share"] == 0.9
    assert told["requests_per_s"] == 9.0
    assert told["ci95"] == pytest.approx(list(stats.binomtest(90, 100).proportion_ci(method="wilson")))
