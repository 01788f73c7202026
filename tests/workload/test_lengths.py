"""Lengths: what is drawn is what was written."""

import random

import numpy as np
import pytest

from kvctl.errors import ConfigError
from kvctl.workload.lengths import LengthSpec


def draws(spec, count=4000):
    rng = random.Random(1)
    return np.array([spec.draw(rng) for _ in range(count)])


def test_a_number_is_that_number():
    assert set(draws(LengthSpec.parse("512"), 20)) == {512}


def test_a_range_is_uniform_with_both_ends():
    found = draws(LengthSpec.parse("3..6"))
    assert set(found) == {3, 4, 5, 6}
    assert np.bincount(found)[3:].min() > 800


def test_normal_lengths_have_their_mean_and_spread():
    found = draws(LengthSpec.parse("500+-50"))
    assert found.mean() == pytest.approx(500, abs=4)
    assert found.std() == pytest.approx(50, rel=0.05)


def test_lognormal_mean_and_deviation_are_of_the_lengths_themselves():
    found = draws(LengthSpec("lognormal", 400, 200), 20_000)
    assert found.mean() == pytest.approx(400, rel=0.02)
    assert found.std() == pytest.approx(200, rel=0.06)


def test_lengths_are_cut_to_their_bounds():
    found = draws(LengthSpec("lognormal", 400, 600, low=100, high=500))
    assert found.min() >= 100
    assert found.max() <= 500


@pytest.mark.parametrize("text", ["", "0", "-4", "a", "5..", "9..3", "0..5", "5+-x", "1.5"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ConfigError):
        LengthSpec.parse(text)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"shape": "odd"},
        {"mean": "x"},
        {"high": 3, "what": 1},
        True,
        2.5,
        {"shape": "uniform", "low": 5},
        {"mean": 5, "low": 0},
        {"mean": float("nan")},
        {"mean": 4, "low": 1.5},
    ],
)
def test_a_wrong_length_in_a_profile_is_named_with_its_place(value):
    with pytest.raises(ConfigError, match=r"chat\.yaml"):
        LengthSpec.from_mapping(value, "chat.yaml")


def test_a_profile_may_write_lengths_in_three_ways():
    assert LengthSpec.from_mapping(5, "x") == LengthSpec.from_mapping("5", "x") == LengthSpec.fixed(5)
    assert LengthSpec.from_mapping({"shape": "uniform", "low": 2, "high": 4}, "x").mean == 3
