"""uvicorn's HTTP/1.1 protocol with the bounds it lacks: time to send a request, size of its head, time to read.

Knows no application. Without these a client that opens connections and says nothing, or says it one byte a minute,
or never reads its stream, holds a connection and memory for ever. Floor 3.

    connected ──head in time?──► body ──(body.py: in time? small enough?)──► response ──read in time?──► keep-alive
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S: Final = 30.0  # from the connection, or the first byte after a response, to the end of the head
MAX_HEAD_BYTES: Final = 64 * 1024
LINGER_S: Final = 1.0  # closing with unread data would reset the connection before the client reads the refusal
WRITE_STALL_TIMEOUT_S: Final = 60.0  # the write buffer stays full that long: the client does not read

_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class BoundedHttpProtocol(HttpToolsProtocol):  # type: ignore[misc]  # uvicorn is untyped here
    """One connection. Timers are armed only while the client owes us something."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_refused = False  # the head was too large: the rest of it is read away
        self._is_in_request = False  # a head is complete and its response is not

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Give the client a while to send its first request."""
        super().connection_made(transport)
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._cancel_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; between requests, count what comes until a head is complete."""
        if self._is_refused:
            return
        if not self._is_in_request:
            self._arm_head_timer()
            self._head_bytes += len(data)
        super().data_received(data)
        is_head_unfinished = not self._is_in_request and not self._is_discarding()
        if is_head_unfinished and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._is_refused = True
            self.transport.write(_TOO_LARGE)
            self._cancel_head_timer()
            self._head_timer = self.loop.call_later(LINGER_S, self._head_too_late)

    def on_headers_complete(self) -> None:
        """The head is here: the rest is the application's to wait for."""
        self._is_in_request = True
        self._cancel_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A body that nobody wanted has ended: the connection is idle, not slow."""
        super().on_message_complete()
        if self.cycle.response_complete and not self._is_in_request:
            self.cycle.more_body = False
            self._head_bytes = 0
            self._cancel_head_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """The next bytes belong to the next request, or to the rest of a body that was refused."""
        self._is_in_request = bool(self.pipeline)
        self._head_bytes = 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads too slowly: the application waits, but not for ever."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _is_discarding(self) -> bool:
        """Whether the rest of a refused body is arriving."""
        return self.cycle is not None and self.cycle.response_complete and self.cycle.more_body

    def _arm_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_late)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
