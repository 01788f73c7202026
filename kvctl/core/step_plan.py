"""A step's plan in the making: who computes how many tokens, what is left of the budget, what the runner must learn.

Keeps the counts of its requests (`num_computed_tokens`, `num_in_flight`) in step with what was planned, in both
directions: a request that loses its blocks in the step that planned it is taken out as if it had never been in.
Knows no blocks beyond their ids, no queue and no policy. Floor 0.
"""

from kvctl.core.request import Request
from kvctl.core.step import BlockTables, NewRequestData, SchedulerOutput


class StepPlan:
    """Entries in running order. `request_ids` and `counts` are parallel."""

    __slots__ = (
        "budget_tokens",
        "counts",
        "left_tokens",
        "new_blocks",
        "new_requests",
        "num_prefill_tokens",
        "preempted_ids",
        "request_ids",
    )

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self.left_tokens = budget_tokens
        self.request_ids: list[str] = []
        self.counts: list[int] = []
        self.new_blocks: dict[str, BlockTables] = {}
        self.new_requests: list[NewRequestData] = []
        self.preempted_ids: list[str] = []
        self.num_prefill_tokens = 0  # of the planned ones, belonging to prompts

    def put(self, request: Request, num_tokens: int) -> None:
        """Enter the request's next `num_tokens` tokens. Where they reach its newest token, one is sampled."""
        self.request_ids.append(request.request_id)
        self.counts.append(num_tokens)
        self.left_tokens -= num_tokens
        self.num_prefill_tokens += _num_prompt_tokens(request, num_tokens)
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == len(request.token_ids) + request.num_in_flight:
            request.num_in_flight += 1

    def admit(self, request: Request, num_cached: int, num_tokens: int, block_tables: BlockTables) -> None:
        """Enter a request that the runner does not know, `num_cached` of whose tokens need not be computed."""
        request.num_computed_tokens = num_cached
        self.new_requests.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                eos_token_ids=request.eos_token_ids,
                block_tables=block_tables,
                num_computed_tokens=num_cached,
            )
        )
        self.put(request, num_tokens)

    def take_back(self, request: Request) -> bool:
        """Undo `put`; False: the request is not in this plan. O(requests in it)."""
        if request.request_id not in self.request_ids:
            return False
        position = self.request_ids.index(request.request_id)
        num_tokens = self.counts.pop(position)
        del self.request_ids[position]
        self.new_blocks.pop(request.request_id, None)
        self.left_tokens += num_tokens
        if request.num_computed_tokens >= len(request.token_ids):  # they reached its newest token
            request.num_in_flight -= 1
        request.num_computed_tokens -= num_tokens
        self.num_prefill_tokens -= _num_prompt_tokens(request, num_tokens)
        return True

    def output(self) -> SchedulerOutput:
        """What the runner is given; the scheduler adds whom it has to forget."""
        return SchedulerOutput(
            request_ids=self.request_ids,
            num_scheduled_tokens=self.counts,
            total_num_scheduled_tokens=self.budget_tokens - self.left_tokens,
            new_requests=self.new_requests,
            new_block_ids=self.new_blocks,
            finished_request_ids=[],
            preempted_request_ids=[],
        )


def _num_prompt_tokens(request: Request, num_tokens: int) -> int:
    """How many of the next `num_tokens` tokens belong to the prompt."""
    return max(0, min(num_tokens, request.num_prompt_tokens - request.num_computed_tokens))
