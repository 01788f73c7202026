"""Log probabilities in the three shapes that clients read: chat's, completions' and prompt_logprobs'.

Knows no request and no engine, only `TokenLogprobs` and how a token reads. Values under -9999 (impossible tokens)
are shown as -9999, because JSON has no infinity. Floor 3.
Source of the shapes: OpenAI's API reference (chat `logprobs.content`, legacy completions `logprobs`) and
serving_conventions for `prompt_logprobs`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvctl.core.step import TokenLogprobs

LOWEST: Final = -9999.0


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE vocabularies write bytes with (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


def token_bytes(piece: str, text: str) -> bytes:
    """The bytes of a token that reads `text` and is written `piece` in the vocabulary.

    They differ from the text's where a token holds part of a character.
    """
    if "\ufffd" not in text:
        return text.encode()
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    if all(char in _BYTE_OF for char in piece):
        return bytes(_BYTE_OF[char] for char in piece)
    return text.encode()


class TokenTexts:
    """How single tokens read, remembered: one vocabulary entry is decoded once."""

    def __init__(self, text_of: Callable[[int], str], piece_of: Callable[[int], str | None]) -> None:
        self._text_of = text_of
        self._piece_of = piece_of
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        """Return the text and the bytes of a token."""
        known = self._known.get(token_id)
        if known is None:
            text = self._text_of(token_id)
            known = text, list(token_bytes(self._piece_of(token_id) or "", text))
            self._known[token_id] = known
        return known

    def name(self, token_id: int, *, as_id: bool) -> str:
        """The token as a client wants it: its text, or 'token_id:123' which is never ambiguous."""
        return f"token_id:{token_id}" if as_id else self(token_id)[0]


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


class LogprobFormatter:
    """Shapes the logprobs of one choice; keeps the text offset between deltas."""

    def __init__(self, texts: TokenTexts, *, num_top: int, as_ids: bool = False) -> None:
        self._texts = texts
        self._num_top = num_top  # -1: all
        self._as_ids = as_ids
        self._offset = 0

    def _ranked(self, position: TokenLogprobs) -> list[tuple[int, float]]:
        """The most likely tokens, best first, as many as were asked for."""
        pairs = list(zip(position.token_ids[1:], position.logprobs[1:], strict=True))
        return pairs if self._num_top < 0 else pairs[: self._num_top]

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.name(token_id, as_id=self._as_ids),
            "logprob": _finite(logprob),
            "bytes": self._texts(token_id)[1],
        }

    def chat(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Shape as chat completions do: {"content": [{token, logprob, bytes, top_logprobs}]}."""
        return {
            "content": [
                {
                    **self._chat_token(position.token_ids[0], position.logprobs[0]),
                    "top_logprobs": [self._chat_token(*pair) for pair in self._ranked(position)],
                }
                for position in positions
            ]
        }

    def completion(self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Shape as completions do: parallel lists `tokens`, `token_logprobs`, `top_logprobs`, `text_offset`.

        A position without logprobs (the first token of an echoed prompt) has nulls.
        """
        shaped: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            shaped["tokens"].append(self._texts.name(token_id, as_id=self._as_ids))
            shaped["text_offset"].append(self._offset)
            self._offset += len(self._texts(token_id)[0])
            if position is None:
                shaped["token_logprobs"].append(None)
                shaped["top_logprobs"].append(None)
                continue
            shaped["token_logprobs"].append(_finite(position.logprobs[0]))
            named: dict[str, float] = {}
            for one, value in ((token_id, position.logprobs[0]), *self._ranked(position)):
                named.setdefault(self._texts.name(one, as_id=self._as_ids), _finite(value))  # of equal texts the first
            shaped["top_logprobs"].append(named)
        return shaped


def shape_prompt_logprobs(
    positions: Sequence[TokenLogprobs | None], texts: TokenTexts
) -> list[dict[str, dict[str, Any]] | None]:
    """Shape as vLLM's `prompt_logprobs`: per prompt token null or {token id: {logprob, rank, decoded_token}}."""
    shaped: list[dict[str, dict[str, Any]] | None] = []
    for position in positions:
        if position is None:
            shaped.append(None)
            continue
        ranks = [position.rank, *range(1, len(position.token_ids))]
        entries: dict[str, dict[str, Any]] = {}
        for token_id, value, rank in zip(position.token_ids, position.logprobs, ranks, strict=True):
            entries.setdefault(
                str(token_id), {"logprob": _finite(value), "rank": rank, "decoded_token": texts(token_id)[0]}
            )
        shaped.append(entries)
    return shaped
