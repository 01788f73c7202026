"""Gathers streams to their end, for answers in one piece. Knows no JSON. Floor 3."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvctl.core.request import FinishReason
from kvctl.core.step import TokenLogprobs
from kvctl.engine.request_output import RequestOutput
from kvctl.server.exchange import OutputStream, merge
from kvctl.server.streaming import raise_if_failed


@dataclass(slots=True)
class CollectedChoice:
    """One whole completion."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    def add(self, output: RequestOutput) -> None:
        """Take one delivery in."""
        self.texts.append(output.text_delta)
        self.token_ids += output.token_ids_delta
        self.logprobs += output.logprobs_delta
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.num_cached_tokens = output.num_cached_tokens


@dataclass(slots=True)
class CollectedPrompt:
    """All completions of one prompt."""

    choices: list[CollectedChoice]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def num_logprobs(self) -> int:
        """How many log probabilities it holds, about."""
        positions = [
            *(self.prompt_logprobs or ())[1:2],
            *(choice.logprobs[0] for choice in self.choices if choice.logprobs),
        ]
        width = max((len(position.token_ids) for position in positions if position is not None), default=0)
        return width * (len(self.prompt_logprobs or ()) + sum(len(choice.logprobs) for choice in self.choices))

    @property
    def num_cached_tokens(self) -> int:
        """What the prefix cache held before this request: later choices find what the first one computed."""
        return min(choice.num_cached_tokens for choice in self.choices)


async def collect(streams: Sequence[OutputStream], n: int) -> list[CollectedPrompt]:
    """Read all streams to their end.

    Raises:
        KvctlError: whatever a stream raises, or a request that failed in the engine.
    """
    prompts = [CollectedPrompt([CollectedChoice() for _ in range(n)]) for _ in streams]
    async with aclosing(merge(streams)) as outputs:
        async for index, output in outputs:
            raise_if_failed(output)
            prompt = prompts[index]
            prompt.choices[output.index].add(output)
            if output.prompt_logprobs is not None:
                prompt.prompt_logprobs = output.prompt_logprobs
    return prompts
