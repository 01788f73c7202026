"""Answers as JSON text: at once where they are short, beside the event loop and in pieces where they are long.

Knows no field. The `json` package writes a value in one native call in which nothing else runs: the logprobs of 8,000
prompt tokens take two seconds. Written piece by piece in a thread they take as long, and others' tokens pass. Floor 3.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

from starlette.responses import Response

INLINE_VALUES: Final = 2_000  # a few milliseconds
_PIECE_ITEMS: Final = 64


def dump_json(value: Any) -> str:
    """Write a value in one go.

    Raises:
        ValueError: a NaN or infinity, which JSON has not.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dump_in_pieces(value: Any) -> str:
    """Write the same text; no piece is longer than a list or object of plain values, or of a few of them."""
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        return "{" + ",".join(f"{dump_json(key)}:{dump_in_pieces(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value[:2]):
        return "[" + ",".join(map(dump_in_pieces, value)) + "]"
    if isinstance(value, list) and len(value) > _PIECE_ITEMS:
        pieces = (value[start : start + _PIECE_ITEMS] for start in range(0, len(value), _PIECE_ITEMS))
        return "[" + ",".join(dump_json(piece)[1:-1] for piece in pieces) + "]"
    return dump_json(value)


async def json_answer(build: Callable[[], Any], num_values: int) -> Response:
    """Answer 200 with what `build` returns; `num_values` says how long that takes, roughly."""
    if num_values <= INLINE_VALUES:
        content = dump_json(build()).encode("utf-8", "replace")
    else:
        content = await asyncio.to_thread(lambda: dump_in_pieces(build()).encode("utf-8", "replace"))
    return Response(content, media_type="application/json")
