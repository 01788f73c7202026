"""Arrival processes, against the distributions they claim to be."""

import math
from itertools import islice

import numpy as np
import pytest
from scipy import stats

from kvctl.errors import ConfigError
from kvctl.workload.arrivals import ArrivalSpec, RateSegment


def gaps(spec, count, seed=1):
    times = list(islice(spec.times_s(seed), count))
    return np.diff([0.0, *times])


def test_poisson_gaps_are_exponential():
    assert stats.kstest(gaps(ArrivalSpec.steady(20.0), 4000), "expon", args=(0, 1 / 20)).pvalue > 0.01


@pytest.mark.parametrize("burstiness", [0.25, 2.0, 8.0])
def test_gamma_gaps_are_gamma_at_the_same_rate(burstiness):
    found = gaps(ArrivalSpec.steady(10.0, "gamma", burstiness), 4000)
    assert stats.kstest(found, "gamma", args=(burstiness, 0, 1 / (10 * burstiness))).pvalue > 0.01


def test_the_test_would_notice_a_wrong_distribution():
    assert stats.kstest(gaps(ArrivalSpec.steady(20.0, "gamma", 2.0), 4000), "expon", args=(0, 1 / 20)).pvalue < 1e-6


def test_constant_gaps_are_constant_and_the_first_is_due_at_once():
    assert list(islice(ArrivalSpec.steady(4.0, "constant").times_s(0), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_a_ramp_has_the_rate_of_its_line():
    spec = ArrivalSpec.parse("10..110@20s")
    times = np.array(list(spec.times_s(3)))
    # the number up to t is Poisson with mean 10 t + 2.5 t^2: warped to unit rate the gaps are exponential
    warped = 10 * times + 2.5 * times**2
    assert stats.kstest(np.diff([0.0, *warped]), "expon").pvalue > 0.01
    assert len(times) == pytest.approx(1200, abs=4 * math.sqrt(1200))
    assert times.max() < 20


def test_a_ramp_downwards_to_zero_ends():
    times = list(ArrivalSpec.parse("50..0@4s", "constant").times_s(0))
    assert len(times) == 100
    assert times == sorted(times)
    assert times[-1] < 4.0


def test_steps_have_each_their_rate():
    times = np.array(list(ArrivalSpec.parse("5@10s,50@10s", "constant").times_s(0)))
    assert ((times < 10).sum(), (times >= 10).sum()) == (50, 500)


def test_nothing_is_due_while_bursts_are_off():
    times = np.array(list(islice(ArrivalSpec.parse("100@2s,0@8s,...").times_s(5), 2000)))
    assert (times % 10 < 2).all()
    assert times.max() > 60


def test_one_seed_one_schedule():
    spec = ArrivalSpec.steady(7.0, "gamma", 0.5)
    assert gaps(spec, 50, seed=9).tolist() == gaps(spec, 50, seed=9).tolist()
    assert gaps(spec, 50, seed=9).tolist() != gaps(spec, 50, seed=10).tolist()


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "abc", "5,6", "1..2", "1..@5s", "nan", "inf", "5@0s", "5@-1s", "0@5s", ",", "...", "5@xs"]
)
def test_a_rate_that_is_none_is_refused(text):
    with pytest.raises(ConfigError):
        ArrivalSpec.parse(text)


def test_impossible_burstiness_is_refused():
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError):
            ArrivalSpec.steady(1.0, "gamma", value)
    with pytest.raises(ConfigError):
        RateSegment(-1, 1, 1)
