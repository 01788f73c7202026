"""Token ids to text while they arrive: no half characters, no text that may still become a stop string.

`IncrementalDetokenizer` and `StopStringMatcher` know one completion each; nothing of requests or streams. What is
emitted is never taken back: at the end the pieces are the whole text. Floor 2, imports no torch.
"""

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

# Prompt tokens the decoder is primed with, so that a completion continues the prompt's text (the space of a
# sentencepiece word, a character that the prompt leaves half done).
_CONTEXT_TOKENS: Final = 5
# A character has at most 4 bytes, so at most 3 tokens can be waiting for their character's last one. With more held
# back, the earlier ones are invalid UTF-8 and come out.
_MAX_HELD_TOKENS: Final = 8
_MAX_WAITING_TOKENS: Final = 3
_BROKEN: Final = "\ufffd"  # what decoding gives for bytes that are no character


def _num_common(one: str, other: str) -> int:
    """Return how many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


class IncrementalDetokenizer:
    """The text of one completion, piece by piece, in constant time per token.

    An incomplete UTF-8 character is held back until the next token completes it. Bytes that no token can complete
    any more come out as U+FFFD.
    """

    __slots__ = ("_backend", "_context", "_held", "_shown", "_skip_special_tokens", "_stream")

    def __init__(self, backend: Backend, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # the latest tokens whose text is out
        self._held: list[int] = []  # tokens whose text is not
        self._shown = ""  # text that is out, but that the stream will say again with its next piece
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]:
            self.push(token_id)
        self.flush()

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now, possibly none."""
        held = self._held
        held.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:  # the package's answer where invalid bytes change text that is already out
            return self.flush()
        if piece is not None:
            self._context = held
            self._held = []
            if self._shown:
                piece = piece[_num_common(self._shown, piece) :]
                self._shown = ""
            return piece
        if len(held) < _MAX_HELD_TOKENS:
            return ""
        self._held, waiting = held[:-_MAX_WAITING_TOKENS], held[-_MAX_WAITING_TOKENS:]
        return self.flush() + "".join(map(self.push, waiting))

    def flush(self) -> str:
        """Return what is held back, with U+FFFD for what stayed incomplete, and go on from there."""
        if not self._held:
            return ""
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        if after.startswith(before) or before.endswith(_BROKEN):  # what was broken may have become a character
            text = after[_num_common(before, after) :]
        else:
            text = self._decode(self._held)
        self._context = (self._context + self._held)[-_CONTEXT_TOKENS:]
        self._held = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special_tokens)
        shown = self._decode(self._context)
        self._shown = shown if shown.endswith(_BROKEN) else ""  # the stream waits for such a text to go on
        return text

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text


class StopStringMatcher:
    """Finds the first stop string in a text that comes in pieces; holds back what may be the start of one.

    "First" is the one that ends first, the longer of two that end together: so the result does not depend on how
    the text was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; return what may be shown and the stop string that ended the text, if one did.

        With `may_stop` false (min_tokens is not reached) stop strings that end in this text do not count.
        """
        text = self._held + text
        end_of_old = len(self._held)
        if may_stop:
            found = self._find(text, end_of_old)
            if found is not None:
                start, stop = found
                self._held = ""
                return text[: start + len(stop) if self._include else start], stop
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return what is held back: nothing more will come."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, end_of_old: int) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, end_of_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string starts with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
