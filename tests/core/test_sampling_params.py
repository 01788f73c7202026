import math

import pytest

from kvctl.core.sampling_params import SamplingParams
from kvctl.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("n", 0),
        ("seed", 2**63),
        ("stop", ("",)),
        ("bad_words", ("",)),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("stop", ("x",) * 65),
        ("stop", ("x" * 8192, "y" * 8193)),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field and caught.value.http_status == 400


def test_bias_must_be_finite_and_within_100() -> None:
    for bias in (101, math.nan):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            SamplingParams(logit_bias={5: bias})


def test_several_greedy_answers_to_one_prompt_make_no_sense() -> None:
    with pytest.raises(InvalidRequest, match="greedy"):
        SamplingParams(n=2, temperature=0)


def test_tiny_temperatures_are_raised_and_zero_is_greedy() -> None:
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert SamplingParams(temperature=0).is_greedy and not SamplingParams(temperature=1e-6).is_greedy


def test_minus_one_turns_top_k_off() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
