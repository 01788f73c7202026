"""One request on its way through the scheduler: its tokens, how far they are computed, its state.

Knows no text, no tensors and no clock (`arrival_s` is only compared). One writer: the scheduler sets `status`,
the KV cache manager `block_hashes`. There are no prefill and decode phases: `num_computed_tokens` chases
`num_tokens`, whatever those tokens are. Floor 0.
"""

from enum import Enum
from typing import Final

from kvctl.core.sampling_params import SamplingParams
from kvctl.errors import InvariantViolation


class RequestStatus(Enum):
    """Where a request stands. PREEMPTED is WAITING with a past: its tokens must be computed again."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended; the value is the label of `vllm:request_success`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class WaitingReason(Enum):
    """What a waiting request is short of, or what it stands behind."""

    KV_BLOCKS = "kv_blocks"  # not enough free blocks for it
    MAX_NUM_SEQS = "max_num_seqs"  # as many requests run as may
    TOKEN_BUDGET = "token_budget"  # the step's tokens are spoken for
    PREEMPTION = "preemption"  # a step that had to preempt admits nobody


_NEXT: Final = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set[RequestStatus](),
}


class Request:
    """A prompt, what was generated so far, and the counts the scheduler works with.

    `token_ids` is prompt and output in one list, owned by the request; `num_computed_tokens` of them have
    their KV in the cache or on the way there.
    """

    __slots__ = (
        "allocated_tokens",
        "arrival_s",
        "block_hashes",
        "cache_salt",
        "eos_token_ids",
        "finish_reason",
        "lora_name",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "token_limit",
        "waiting_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        arrival_s: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        *,
        lora_name: str | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.arrival_s = arrival_s
        self.priority = priority
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.eos_token_ids = eos_token_ids
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1  # tokens the first admission found in the prefix cache; -1: not admitted yet
        self.num_in_flight = 0  # tokens that scheduled steps will sample and that are not known yet
        self.num_preemptions = 0
        self.token_limit = self.num_prompt_tokens + sampling_params.max_tokens  # the scheduler may lower it
        self.block_hashes: list[bytes] = []  # of the full blocks known so far, filled by the KV cache manager
        self.allocated_tokens = 0  # its blocks have room for that many; written by the KV cache manager
        self.stop_token_ids: frozenset[int] = frozenset()  # all that end it, eos included; set by the scheduler
        self.waiting_reason: WaitingReason | None = None  # why it was not admitted when it was tried last
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be computed for it."""
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Change the state along a legal edge.

        Raises:
            InvariantViolation: there is no such edge.
        """
        if status not in _NEXT[self.status]:
            raise InvariantViolation(f"request {self.request_id} cannot go from {self.status.name} to {status.name}")
        self.status = status

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} tokens, "
            f"{self.num_prompt_tokens} of prompt)"
        )
