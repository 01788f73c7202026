"""What a caller of the engine receives: text and tokens since the last delivery, and how it ended.

Knows no HTTP. Floor 2, imports no torch.
"""

from dataclasses import dataclass, field

from kvctl.core.request import FinishReason
from kvctl.core.step import TokenLogprobs
from kvctl.metrics.timeline import RequestTimeline


@dataclass(slots=True)
class RequestOutput:
    """News of one completion (child `index` of 0..n-1) of one request since the last delivery.

    A consumer that reads slowly gets fewer and larger deltas, never a longer queue. `text_delta` may be empty
    although tokens arrived: half a character, or what may be the start of a stop string, is held back; at the end
    `"".join` of all deltas is the whole text, cut at the stop string. `token_ids_delta` has every generated token,
    also those whose text was cut.
    """

    request_id: str
    prompt_token_ids: list[int]
    index: int = 0
    text_delta: str = ""
    token_ids_delta: list[int] = field(default_factory=list)
    logprobs_delta: list[TokenLogprobs] = field(default_factory=list)  # parallel to token_ids_delta, where asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with child 0; None for the first token
    finish_reason: FinishReason | None = None  # of this child
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finished: bool = False  # all children are: this is the last output of the request
    timeline: RequestTimeline | None = None  # of this child, with its finish_reason

    def merge(self, later: "RequestOutput") -> "RequestOutput":
        """Add what came later to this output and return it; linear in what is new, as both are owned here."""
        self.text_delta += later.text_delta
        self.token_ids_delta += later.token_ids_delta
        self.logprobs_delta += later.logprobs_delta
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_cached_tokens = later.num_cached_tokens
        self.finished = later.finished
        self.timeline = later.timeline
        return self
