"""What one step plans, computes and tells: the only types that cross between scheduler, runner and API process.

Knows no tensors and no text. Parallel lists instead of one object per request: a step over 1,024 requests must
not cost 1,024 allocations. Floor 0.

    Scheduler.schedule() -> SchedulerOutput -> ModelRunner.execute() -> ModelRunnerOutput
    Scheduler.update(SchedulerOutput, ModelRunnerOutput) -> list[EngineOutput] -> (process line) -> API process
"""

from dataclasses import dataclass, field

from kvctl.core.request import FinishReason
from kvctl.core.sampling_params import SamplingParams

BlockTables = tuple[list[int], ...]  # one block table per KV cache group


@dataclass(slots=True)
class NewRequestData:
    """A request the runner has no state of: just admitted, or admitted again after a preemption."""

    request_id: str
    token_ids: list[int]  # prompt, and after a preemption the output so far; a copy, the runner owns it
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    block_tables: BlockTables  # copies, the runner owns them
    num_computed_tokens: int  # found in the prefix cache


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step. `request_ids` and `num_scheduled_tokens` are parallel and in running order.

    The runner keeps each request's token ids, block tables and computed count between steps: it adds the tokens
    it samples and the blocks of `new_block_ids` itself, and forgets a request named in `finished_request_ids`
    or `preempted_request_ids`. These two are to be applied BEFORE `new_requests`: a request may be preempted
    and admitted again between two executed steps.
    """

    request_ids: list[str]
    num_scheduled_tokens: list[int]
    total_num_scheduled_tokens: int
    new_requests: list[NewRequestData]
    new_block_ids: dict[str, BlockTables]  # blocks to append to a known request's tables, per group
    finished_request_ids: list[str]
    preempted_request_ids: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.request_ids


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the raw model distribution (before temperature and penalties).

    `token_ids[0]` is the token that was chosen (or stands in the prompt) with its 1-based `rank`; the most likely
    ones follow, best first, `logprobs` parallel.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step computed. `sampled_token_ids` is parallel to `SchedulerOutput.request_ids`.

    None stands for a request whose scheduled tokens do not reach its last known token: nothing is sampled.
    """

    sampled_token_ids: list[int | None]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)  # once complete


@dataclass(slots=True)
class EngineOutput:
    """News of one request after one step. `finish_reason` is set in its last one."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id, where one ended it
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """State and increments of one step, for metrics and logs. Increments count since the step before."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_by_reason: dict[str, int] = field(default_factory=dict)  # WaitingReason value -> requests
    num_free_blocks: int = 0
    num_usable_blocks: int = 0  # without the null block
    prefix_cache_queries: int = 0  # tokens looked up at first admissions
    prefix_cache_hits: int = 0  # of those, found
    prefix_miss_reasons: dict[str, int] = field(default_factory=dict)  # reason -> tokens not found
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # computed again after a preemption
    num_scheduled_tokens: int = 0
    num_prefill_tokens: int = 0  # of those, belonging to prompts
    step_duration_s: float = 0.0  # of the step that has ended; 0: none has
    schedule_duration_s: float = 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the usable blocks that running requests hold, 0 to 1."""
        if self.num_usable_blocks == 0:
            return 0.0
        return 1.0 - self.num_free_blocks / self.num_usable_blocks


@dataclass(slots=True)
class AdmissionEvent:
    """A waiting request started to run, at first or again, at `at_s` of the engine's clock."""

    request_id: str
    at_s: float


@dataclass(slots=True)
class StepResult:
    """Everything the API process learns from one step; the one message of the outbox."""

    outputs: list[EngineOutput]
    stats: SchedulerStats
    at_s: float  # engine clock (monotonic, the same for all processes of a machine) at the end of the step
    admissions: list[AdmissionEvent] = field(default_factory=list)
