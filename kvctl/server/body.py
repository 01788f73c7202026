"""Receives and reads request bodies: JSON only, bounded in size, time and number of values.

Knows no endpoint. A body over the limit is refused from its Content-Length, or as soon as that many bytes came; all
half-received ones together are bounded too. JSON is read in one native call in which nothing else runs (it keeps the
interpreter lock, so a thread would not help), and what that costs depends on the number of values, not of bytes:
8 MiB of text take 5 ms, 8 MiB of numbers half a second. So the values are counted first. Floor 3.
"""

import asyncio
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kvctl.errors import QueueFull
from kvctl.server.errors import BadBody, BodyTimeout, BodyTooLarge, ClientDisconnected, ShuttingDown, from_validation
from kvctl.units import MIB, format_bytes

BODY_TIMEOUT_S: Final = 60.0
HELD_BYTES: Final = 256 * MIB  # of all half-received bodies, beyond the first SMALL_BYTES of each
SMALL_BYTES: Final = 64 * 1024  # what uvicorn holds of a body in any case
# At most one value per so many bytes that a body may have, so that reading one takes about a tenth of a second at most
BYTES_PER_VALUE: Final = 16
BYTES_PER_STRING: Final = 128
BYTES_PER_CONTAINER: Final = 512

Model = TypeVar("Model", bound=BaseModel)


class BodyReader:
    """Receives the bodies of one server's requests."""

    def __init__(self, max_bytes: int, *, timeout_s: float = BODY_TIMEOUT_S, max_held_bytes: int = HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._max_held_bytes = max(max_held_bytes, max_bytes)
        self._limits: set[asyncio.Timeout] = set()  # of the bodies that are being received
        self._is_ending = False
        self.held_bytes = 0  # of bodies that are being received, beyond the first SMALL_BYTES of each

    def end_all(self) -> None:
        """Wait for no more of the bodies that are being received: the server ends."""
        self._is_ending = True
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())

    async def read_json(self, request: Request, model: type[Model]) -> Model:
        """Receive a JSON body and read it as `model`.

        Raises:
            BadBody, BodyTooLarge, BodyTimeout, QueueFull, ClientDisconnected: as `receive_json` and `parse_json`.
        """
        return parse_json(await self.receive_json(request), model)

    async def receive_json(self, request: Request) -> bytes:
        """Receive a body that says it is JSON.

        Raises:
            BadBody: another content type.
            BodyTooLarge: more bytes were announced or came than are allowed, or too many values.
            BodyTimeout: it did not end in time.
            QueueFull: too much of other bodies is being received.
            ShuttingDown: the server ends.
            ClientDisconnected: the client left.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise BadBody(
                f"the content type is {media_type[:80] or 'missing'!r}, only application/json is read",
                hint="Send the header Content-Type: application/json.",
            )
        announced = request.headers.get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                self._limits.add(limit)
                try:
                    data = await self._receive(request)
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self._is_ending:
                raise ShuttingDown("the server is shutting down", hint="Send the request to another server.") from None
            raise BodyTimeout(f"the body did not arrive within {self._timeout_s:g} s") from None
        if len(data) > SMALL_BYTES:
            check_values(data, self._max_bytes)
        return data

    async def _receive(self, request: Request) -> bytes:
        parts: list[bytes] = []
        size = held = 0
        try:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                if part := message.get("body", b""):
                    parts.append(part)
                    size += len(part)
                if size > self._max_bytes:
                    raise self._too_large()
                if not message.get("more_body", False):
                    return b"".join(parts)
                more = max(0, size - SMALL_BYTES) - held
                held, self.held_bytes = held + more, self.held_bytes + more
                if self.held_bytes > self._max_held_bytes:
                    raise QueueFull(
                        f"over {format_bytes(self._max_held_bytes)} of requests are being received",
                        hint="Try again later, or send fewer prompts per request.",
                    )
        finally:
            self.held_bytes -= held

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is over {format_bytes(self._max_bytes)}",
            hint="Send fewer or shorter prompts per request; the server's --max-body-size sets the limit.",
        )


def check_values(data: bytes, max_bytes: int) -> None:
    """Refuse JSON that would take long to read; most is passed after counting commas and brackets.

    Raises:
        BodyTooLarge: with what there is too much of.
    """
    num_values, num_strings = max_bytes // BYTES_PER_VALUE, max_bytes // BYTES_PER_STRING
    num_containers = max_bytes // BYTES_PER_CONTAINER
    if (
        data.count(b",") <= num_values
        and data.count(b'"') <= 2 * num_strings
        and data.count(b"[") + data.count(b"{") <= num_containers
    ):
        return
    # what stands in texts is no structure: count again without them
    data = data.replace(rb"\\", b"").replace(rb"\"", b"")
    found = data.count(b'"') // 2
    if found > num_strings:
        raise _too_many(found, "strings", num_strings)
    structure = b"".join(data.split(b'"')[::2])
    for found, what, allowed in (
        (structure.count(b","), "values", num_values),
        (structure.count(b"[") + structure.count(b"{"), "lists and objects", num_containers),
    ):
        if found > allowed:
            raise _too_many(found, what, allowed)


def _too_many(found: int, what: str, allowed: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body holds {found:,} {what}, {allowed:,} are allowed",
        hint="Send fewer prompts per request; a larger --max-body-size allows more.",
    )


def parse_json(data: bytes, model: type[Model]) -> Model:
    """Read JSON as `model`.

    Raises:
        BadBody: no JSON, or a field that is missing or of a wrong type.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error) from None
