"""uvicorn's HTTP/1.1 protocol with the bounds it lacks: time to send a request, size of its head, time to read.

Knows no application. Without these a client that opens connections and says nothing, or says it one byte a minute,
or never reads its stream, or sends heads and trailers without end, holds a connection and memory for ever. Floor 3.

    connected ──head in time?──► body ──(body.py: in time? small enough?)──► response ──read in time?──► keep-alive
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S: Final = 30.0  # from the connection, or the first byte after a response, to the end of the head
MAX_HEAD_BYTES: Final = 64 * 1024  # of a head, and of trailers
LINGER_S: Final = 1.0  # closing with unread data would reset the connection before the client reads the refusal
WRITE_STALL_TIMEOUT_S: Final = 60.0  # bytes stay unsent that long: the client does not read

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
        self._pending_bytes = 0  # received since the parser last finished a head, a piece of a body or a message
        self._is_refused = False  # the head was too large: the rest of it is read away
        self._is_in_request = False  # a head is complete and its response is not
        self._running: Any = None  # the cycle whose response is made; `cycle` is that of the newest head

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Give the client a while to send its first request."""
        super().connection_made(transport)
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers; tell the running request, also where more of them were sent behind it."""
        self._cancel_head_timer()
        self._cancel_write_timer()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and hang up if it gets nowhere with all it is fed."""
        if self._is_refused:
            return
        if not self._is_in_request:
            self._arm_head_timer()
        self._pending_bytes += len(data)
        super().data_received(data)
        if self._pending_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        """The head is here: the rest is the application's to wait for."""
        self._pending_bytes = 0
        self._is_in_request = True
        self._cancel_head_timer()
        self._unset_keepalive_if_required()  # armed in this very read, where it began with the end of another body
        before = self.cycle
        super().on_headers_complete()
        if before is None or before.response_complete:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        """A piece of a body: whoever reads it bounds it."""
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A body that nobody wanted has ended: the connection is idle, not slow."""
        self._pending_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete and not self._is_in_request:
            self.cycle.more_body = False
            self._cancel_head_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """The next bytes belong to the next request, or to the rest of a body that was refused."""
        self._is_in_request = bool(self.pipeline)
        if self.pipeline:
            self._running = self.pipeline[-1][0]  # the next one, which uvicorn starts now
        super().on_response_complete()
        if self.transport.is_closing():
            self._arm_write_timer()

    def pause_writing(self) -> None:
        """The client reads too slowly: the application waits, but not for ever."""
        super().pause_writing()
        self._arm_write_timer()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._cancel_write_timer()
        super().resume_writing()
        if self.transport.is_closing():  # the rest must go out in time too
            self._arm_write_timer()

    def timeout_keep_alive_handler(self) -> None:
        """No request came for a while."""
        self._hang_up()

    def _refuse(self) -> None:
        self._is_refused = True
        if self._is_in_request:  # a response is being made: nothing else can be said in between
            self.transport.abort()
            return
        self.transport.write(_TOO_LARGE)
        self._cancel_head_timer()
        self._head_timer = self.loop.call_later(LINGER_S, self._hang_up)

    def _arm_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._hang_up)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _arm_write_timer(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_STALL_TIMEOUT_S, self.transport.abort)

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _hang_up(self) -> None:
        """Close once everything is sent; a client that does not read it is cut off."""
        if not self.transport.is_closing():
            self.transport.close()
            self._arm_write_timer()
