"""Reads and validates a request's body: bounded in size and time, JSON only.

Knows no endpoint. A body over the limit is refused from its Content-Length, or as soon as that many bytes came:
it is never held in memory as a whole. Floor 3.
"""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kvctl.server.errors import BadBody, BodyTimeout, BodyTooLarge, ClientDisconnected, from_validation
from kvctl.units import MIB, format_bytes

MAX_BODY_BYTES = 32 * MIB  # 1,024 prompts of 8,192 token ids are under 60 MB in the widest notation, 30 MB as usual
BODY_TIMEOUT_S = 60.0

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, limit_bytes: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Receive the whole body.

    Raises:
        BodyTooLarge: more than `limit_bytes` were announced or came.
        BodyTimeout: it did not end within `timeout_s`.
        ClientDisconnected: the client left.
    """
    too_large = BodyTooLarge(
        f"the body is over {format_bytes(limit_bytes)}", hint="Send fewer or shorter prompts per request."
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                part = message.get("body", b"")
                size += len(part)
                if size > limit_bytes:
                    raise too_large
                if part:
                    parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {timeout_s:g} s") from None


async def read_json_body(request: Request) -> bytes:
    """Receive a body that says it is JSON.

    Raises:
        BadBody: another content type.
        BodyTooLarge, BodyTimeout, ClientDisconnected: as `read_body`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BadBody(
            f"the content type is {media_type or 'missing'!r}, only application/json is read",
            hint="Send the header Content-Type: application/json.",
        )
    return await read_body(request)


def parse_json(data: bytes, model: type[Model]) -> Model:
    """Read JSON as `model`.

    Raises:
        BadBody: no JSON, or a field that is missing or of a wrong type.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error) from None


async def read_json(request: Request, model: type[Model]) -> Model:
    """Receive a JSON body and read it as `model`.

    Raises:
        BadBody, BodyTooLarge, BodyTimeout, ClientDisconnected: as the functions above.
    """
    return parse_json(await read_json_body(request), model)
