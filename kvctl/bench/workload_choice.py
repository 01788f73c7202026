"""Which workload a run uses: a profile, or a file. One value that can be sent to another process. Floor 3."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvctl.workload.datasets import Dataset
from kvctl.workload.prompts import PromptMaker
from kvctl.workload.request_plan import Session
from kvctl.workload.workload_profile import WorkloadProfile

_BUST_WORDS = 12


class _Buster:
    """Puts words of its own before the first text of a session, so that no prefix of it is in a cache."""

    def __init__(self, maker: PromptMaker) -> None:
        self._maker = maker

    def __call__(self, session: Session) -> Session:
        first = session.turns[0]
        words = self._maker.unique(_BUST_WORDS)
        messages = first.messages
        if messages:
            messages = [{**messages[0], "content": f"{words} {messages[0].get('content', '')}"}, *messages[1:]]
        turn = replace(first, text=f"{words} {first.text}" if first.text else "", messages=messages)
        return replace(session, turns=(turn, *session.turns[1:]))


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
    def usual_prompt_tokens(self) -> int | None:
        """The mean length of made prompts; None when the texts are given."""
        if self.profile is not None:
            return max(1, round(self.profile.classes[0].input_tokens.mean))
        entry = self.dataset.entries[0] if self.dataset is not None else None
        return getattr(entry, "input_tokens", None)

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
