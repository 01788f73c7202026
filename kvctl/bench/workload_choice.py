"""Which workload a run uses: a profile, or a file. One value that can be sent to another process. Floor 3."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvctl.workload.datasets import Dataset
from kvctl.workload.lengths import LengthSpec
from kvctl.workload.prompts import PromptMaker
from kvctl.workload.request_plan import Session
from kvctl.workload.workload_profile import WorkloadClass, WorkloadProfile

_BUST_WORDS = 12
_WARMUP_INPUT_TOKENS, _WARMUP_OUTPUT_TOKENS = 128, 16


class _Buster:
    """Puts words of its own before what a session begins with, so that no prefix of it is in a cache."""

    def __init__(self, maker: PromptMaker) -> None:
        self._maker = maker

    def __call__(self, session: Session) -> Session:
        words = self._maker.unique(_BUST_WORDS)
        turns = [
            replace(
                turn,
                text=f"{words} {turn.text}" if turn.text and i == 0 else turn.text,
                messages=turn.messages and _busted(turn.messages, words),
            )
            for i, turn in enumerate(session.turns)
        ]
        return replace(session, turns=tuple(turns))


def _busted(messages: Sequence[Mapping[str, Any]], words: str) -> list[Mapping[str, Any]]:
    """Messages that begin with words of their own; content may be a text or a list of parts."""
    first, *others = messages
    content = first.get("content")
    if isinstance(content, list):
        return [{**first, "content": [{"type": "text", "text": words}, *content]}, *others]
    return [{**first, "content": f"{words} {content or ''}"}, *others]


@dataclass(frozen=True)
class WorkloadChoice:
    """A profile or a dataset, exactly one of them."""

    profile: WorkloadProfile | None = None
    dataset: Dataset | None = None
    cache_bust: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether it ends by itself."""
        return self.dataset is not None

    @property
    def is_timed(self) -> bool:
        """Whether it says when requests are due."""
        return self.dataset is not None and self.dataset.is_timed

    @property
    def has_pauses(self) -> bool:
        """Whether users think between their turns: then fewer are in flight than there are users."""
        return self.profile is not None and any(kind.think_s > 0 for kind in self.profile.classes)

    @property
    def usual_prompt_tokens(self) -> int | None:
        """The mean length of made prompts; None when the texts are given."""
        if self.profile is not None:
            return max(1, round(self.profile.classes[0].input_tokens.mean))
        entry = self.dataset.entries[0] if self.dataset is not None else None
        return getattr(entry, "input_tokens", None)

    def for_warmup(self) -> "WorkloadChoice":
        """What warms the server up without sending the texts that are then measured."""
        if self.dataset is None or not isinstance(self.dataset.entries[0], Session):
            return self  # made of another seed, so different texts
        kind = WorkloadClass("warm-up", LengthSpec.fixed(_WARMUP_INPUT_TOKENS), LengthSpec.fixed(_WARMUP_OUTPUT_TOKENS))
        return WorkloadChoice(WorkloadProfile("warm-up", (kind,)))

    def sessions(self, maker: PromptMaker) -> Iterator[Session]:
        """The sessions in order."""
        if self.profile is not None:
            return self.profile.sessions(maker, cache_bust=self.cache_bust)
        assert self.dataset is not None
        sessions = self.dataset.sessions(maker)
        return map(_Buster(maker), sessions) if self.cache_bust else sessions

    def as_json(self) -> dict[str, Any]:
        """The choice as a result tells it."""
        if self.profile is not None:
            return self.profile.as_json() | {"cache_bust": self.cache_bust}
        assert self.dataset is not None
        return {
            "name": self.dataset.path,
            "format": self.dataset.file_format,
            "requests": self.dataset.num_requests,
            "timed": self.dataset.is_timed,
        }
