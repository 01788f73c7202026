import pytest

from kvctl.core.request import Request, RequestStatus
from kvctl.core.sampling_params import SamplingParams
from kvctl.errors import InvariantViolation


def test_tokens_are_prompt_and_output_and_the_prompt_is_copied() -> None:
    prompt = [1, 2, 3]
    request = Request("a", prompt, SamplingParams(max_tokens=4))
    request.token_ids.append(9)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (4, 3, 1)
    assert request.output_token_ids == [9] and prompt == [1, 2, 3] and request.token_limit == 7


@pytest.mark.parametrize("path", [["FINISHED", "RUNNING"], ["PREEMPTED"], ["RUNNING", "WAITING"], ["WAITING"]])
def test_states_change_along_legal_edges_only(path: list[str]) -> None:
    request = Request("a", [1], SamplingParams())
    for name in path[:-1]:
        request.move_to(RequestStatus[name])
    with pytest.raises(InvariantViolation):
        request.move_to(RequestStatus[path[-1]])
