"""Server-sent events, one chunk per delivery of the engine, with as little work per token as HTTP allows.

Knows how bytes reach the client and when to stop; what is in a chunk is its formatter's business. Sends through
ASGI directly: no iterator over an iterator, no task group per chunk. A client that does not read stops its own
stream only (the transport's write buffer is bounded), a client that leaves ends it. Floor 3.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvctl.core.request import FinishReason
from kvctl.engine.request_output import RequestOutput
from kvctl.errors import KvctlError
from kvctl.server.errors import ShuttingDown, describe
from kvctl.server.exchange import Closing, OutputStream, client_left, close_all, merge

DONE: Final = b"data: [DONE]\n\n"
LAST_WORD_TIMEOUT_S: Final = 1.0  # for the error event of a stream that is cut off
logger = logging.getLogger(__name__)

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise hold tokens back
]


class ChunkFormatter(Protocol):
    """Builds the events of one response."""

    def chunk(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Event(s) for one delivery."""
        ...

    def last(self) -> bytes:
        """What comes after the last delivery, before [DONE]: the usage, or nothing."""
        ...


def error_event(error: Exception) -> bytes:
    """Tell a client in mid-stream what went wrong."""
    return b"data: " + json.dumps(describe(error), ensure_ascii=False).encode() + b"\n\n"


def raise_if_failed(output: RequestOutput) -> None:
    """Turn an output that says "the engine could not" into an exception.

    Raises:
        KvctlError: the request failed in the engine.
    """
    if output.finish_reason is FinishReason.ERROR:
        raise KvctlError(f"request {output.request_id} failed in the engine")


class EventStream(Response):
    """The streamed response to one request. Owns its engine streams: they are closed whatever happens."""

    def __init__(
        self,
        streams: Sequence[OutputStream],
        formatter: ChunkFormatter,
        closing: Closing,
    ) -> None:
        super().__init__(None, 200, media_type="text/event-stream")
        self._streams = streams
        self._formatter = formatter
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until its end, the client's leaving or the server's shutdown."""
        producer = watcher = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            producer = asyncio.create_task(self._produce(send))
            watcher = asyncio.create_task(client_left(receive))
            await asyncio.wait((producer, watcher, self._closing.future), return_when=asyncio.FIRST_COMPLETED)
            if not producer.done() and not watcher.done():
                producer.cancel()
                await asyncio.gather(producer, return_exceptions=True)
                async with asyncio.timeout(LAST_WORD_TIMEOUT_S):
                    await _send_end(send, error_event(ShuttingDown("the server is shutting down")))
        except TimeoutError:
            pass  # the client does not read: it cannot be told
        finally:
            tasks = [task for task in (producer, watcher) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await close_all(self._streams)

    async def _produce(self, send: Send) -> None:
        try:
            chunk = self._formatter.chunk
            if len(self._streams) == 1:  # the common case, one coroutine less per token
                async for output in self._streams[0]:
                    raise_if_failed(output)
                    await send({"type": "http.response.body", "body": chunk(0, output), "more_body": True})
            else:
                async with aclosing(merge(self._streams)) as outputs:
                    async for index, output in outputs:
                        raise_if_failed(output)
                        await send({"type": "http.response.body", "body": chunk(index, output), "more_body": True})
            await _send_end(send, self._formatter.last())
        except KvctlError as error:
            await _send_end(send, error_event(error))
        except Exception as error:
            logger.exception("a stream failed")
            await _send_end(send, error_event(error))


async def _send_end(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event + DONE, "more_body": False})
