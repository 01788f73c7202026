"""What is to be asked: sessions of one or more turns, as texts, messages or token counts. Values only.

Knows nothing of HTTP bodies, of arrival processes or of how texts are made. Shared by bench and simulator. Floor 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `text` is what is new in this turn; `messages` (chat) replaces text and history altogether."""

    text: str
    output_tokens: int
    input_tokens: int | None = None  # what the text is meant to cost; None: not known
    think_s: float = 0.0  # waits this long after the answer before
    messages: Sequence[Mapping[str, Any]] | None = None
    system: str = ""  # a prefix shared with other sessions


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another; each sees those before it. `due_s`: from a trace, seconds after the start."""

    turns: Sequence[Turn]
    class_name: str = ""
    due_s: float | None = None
