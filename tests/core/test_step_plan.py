"""What the scheduler plans can be taken back without a trace: the counts of the request and of the plan."""

import pytest

from kvctl.core.step_plan import StepPlan
from tests.support.schedulers import make_request


def counts(plan: StepPlan) -> tuple[object, ...]:
    return (plan.request_ids, plan.counts, plan.left_tokens, plan.num_prefill_tokens, plan.new_blocks)


@pytest.mark.parametrize(
    ("num_computed", "num_in_flight", "num_tokens", "samples", "prefill"),
    [
        (0, 0, 6, False, 6),  # a chunk of a prompt of 8
        (0, 0, 7, False, 7),  # all but the last token: nothing is sampled yet
        (7, 0, 1, True, 1),
        (0, 0, 8, True, 8),
        (8, 1, 1, True, 0),  # a token that is being sampled counts as there
    ],
)
def test_what_was_put_into_a_plan_can_be_taken_back(
    num_computed: int, num_in_flight: int, num_tokens: int, samples: bool, prefill: int
) -> None:
    plan = StepPlan(20)
    other, request = make_request("other", 3), make_request("a", 8)
    plan.put(other, 3)
    before = repr(counts(plan))
    request.num_computed_tokens, request.num_in_flight = num_computed, num_in_flight
    plan.new_blocks["a"] = ([4],)
    plan.put(request, num_tokens)
    assert request.num_in_flight == num_in_flight + samples
    assert request.num_computed_tokens == num_computed + num_tokens
    assert plan.num_prefill_tokens == 3 + prefill and plan.left_tokens == 20 - 3 - num_tokens
    assert plan.take_back(request)
    assert (request.num_computed_tokens, request.num_in_flight) == (num_computed, num_in_flight)
    assert repr(counts(plan)) == before
    assert not plan.take_back(request)


def test_recomputed_output_is_no_prompt() -> None:
    plan = StepPlan(20)
    request = make_request("a", 8)
    request.token_ids += [1, 2, 3]
    plan.admit(request, 4, 7, ([1, 2, 3],))
    assert plan.num_prefill_tokens == 4 and plan.new_requests[0].num_computed_tokens == 4
    assert request.num_computed_tokens == 11 and request.num_in_flight == 1
