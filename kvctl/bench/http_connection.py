"""One HTTP/1.1 connection that carries one request at a time and times what comes back.

The moment of an event is when the bytes that completed it arrived: one moment per read, as `wire` tells it. Knows HTTP
and where events end; knows nothing of their content (`stream_decoder`) or of load. Floor 3.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter

import httptools

from kvctl.bench.sse import SseParser
from kvctl.bench.stream_decoder import StreamDecoder
from kvctl.bench.wire import Wire

_MAX_ERROR_BODY_BYTES = 16 * 1024
_DECODE_BATCH = 16  # events that wait undecoded before a slice of idle time is asked for


class Exchange:
    """One request and what has come back so far. Moments are perf_counter seconds; 0.0: not happened."""

    __slots__ = (
        "body",
        "connect_s",
        "content_type",
        "decoder",
        "due_s",
        "end_s",
        "error_kind",
        "error_text",
        "finished",
        "is_stream",
        "num_reads",
        "on_decoded",
        "payloads",
        "request_id",
        "retry_after_s",
        "sent_s",
        "sse",
        "status",
        "times_s",
    )

    def __init__(
        self,
        request_id: str,
        due_s: float,
        decoder: StreamDecoder,
        finished: "asyncio.Future[None]",
        on_decoded: "Callable[[Exchange], None]",
    ) -> None:
        self.request_id = request_id
        self.due_s = due_s
        self.sent_s = 0.0
        self.connect_s = 0.0  # how long connecting took; 0.0 on a connection that was open
        self.end_s = 0.0
        self.status = 0
        self.content_type = b""
        self.retry_after_s = 0.0
        self.is_stream = False
        self.num_reads = 0
        self.times_s: list[float] = []
        self.payloads: list[bytes] = []
        self.sse = SseParser()
        self.decoder = decoder
        self.body: list[bytes] = []  # of an answer that is no stream
        self.error_kind: str | None = None
        self.error_text = ""
        self.finished = finished
        self.on_decoded = on_decoded  # called once, when the answer has ended and all of it is decoded

    def end(self, now_s: float, error_kind: str | None = None, error_text: str = "") -> None:
        """The answer is complete, or has failed; later calls change nothing."""
        if self.end_s:
            return
        self.end_s = now_s
        if error_kind is not None:
            self.error_kind, self.error_text = error_kind, error_text
        elif self.status != 200:
            self.error_kind, self.error_text = f"http_{self.status}", self._body_text()
        elif not self.is_stream:
            self.error_kind = "not_a_stream"
            self.error_text = f"content type {self.content_type.decode('latin-1')!r}: {self._body_text()}"
        if not self.finished.done():
            self.finished.set_result(None)

    def decode_some(self, max_events: int) -> bool:
        """Decode waiting events; True when none is left."""
        times_s, payloads = self.times_s, self.payloads
        if len(payloads) <= max_events:
            self.times_s, self.payloads = [], []
            self.decoder.decode(times_s, payloads)
            return True
        self.decoder.decode(times_s[:max_events], payloads[:max_events])
        del times_s[:max_events]
        del payloads[:max_events]
        return False

    def _body_text(self) -> str:
        return b"".join(self.body).decode("utf-8", "replace")[:300].strip()


class DecodePump:
    """Decodes events in slices between reads, so that no stream waits long for another one's JSON."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slice_events: int = 16) -> None:
        self._loop = loop
        self._slice_events = slice_events
        self._queue: dict[Exchange, None] = {}  # in order of arrival, each once
        self._is_scheduled = False

    def add(self, exchange: Exchange) -> None:
        """Ask for an exchange's waiting events to be decoded soon."""
        self._queue[exchange] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def drain(self) -> None:
        """Decode all that waits, now."""
        while self._queue:
            self._decode_slice()

    def _decode_slice(self) -> None:
        exchange = next(iter(self._queue), None)
        if exchange is not None and exchange.decode_some(self._slice_events):
            del self._queue[exchange]
            if exchange.end_s:
                exchange.on_decoded(exchange)

    def _run(self) -> None:
        self._decode_slice()
        self._is_scheduled = bool(self._queue)
        if self._is_scheduled:
            self._loop.call_soon(self._run)


class HttpConnection:
    """A keep-alive connection. httptools calls the `on_*` methods while `receive` feeds it."""

    def __init__(self, pump: DecodePump) -> None:
        self._pump = pump
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._wire: Wire
        self._now_s = 0.0
        self._ends_with_close = False
        self.num_requests = 0
        self.is_open = False

    def attach(self, wire: Wire) -> None:
        """Take the open connection to send on."""
        self._wire = wire
        self.is_open = True

    def send(self, exchange: Exchange, request: bytes) -> None:
        """Send a request; `exchange.sent_s` is the moment just before the kernel (or the TLS layer) is given it.

        Not the moment after: on a busy machine the call often returns late, for it wakes the server, which then runs.
        """
        self._exchange = exchange
        self._ends_with_close = False
        self.num_requests += 1
        exchange.sent_s = perf_counter()
        try:
            self._wire.send(request)
        except OSError as error:
            kind = "stale" if self.num_requests > 1 else "cut"
            self.abort(kind, f"could not send the request: {error.strerror}")

    def abort(self, kind: str, text: str) -> None:
        """Give up on the request under way and close the connection."""
        self.is_open = False
        self._end(perf_counter(), kind, text)
        self._wire.abort()

    def close(self) -> None:
        """Close an idle connection."""
        self.is_open = False
        self._wire.close()

    def receive(self, data: bytes, arrival_s: float) -> None:
        """Take bytes of the answer."""
        self._now_s = arrival_s
        exchange = self._exchange
        if exchange is None:  # nobody asked
            self.close()
            return
        exchange.num_reads += 1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort("protocol", f"not HTTP/1.1: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        exchange = self._exchange
        if exchange is None:
            return
        name = name.lower()
        if name == b"content-type":
            exchange.content_type = value
        elif name == b"retry-after":
            try:
                exchange.retry_after_s = float(value)
            except ValueError:
                exchange.retry_after_s = 1.0  # a date: too far off to be worth waiting for
        elif name in (b"content-length", b"transfer-encoding"):
            self._ends_with_close = False

    def on_message_begin(self) -> None:
        """httptools: an answer begins."""
        self._ends_with_close = True  # until a header says how long the body is

    def on_headers_complete(self) -> None:
        """httptools: all headers are in."""
        exchange = self._exchange
        if exchange is not None:
            exchange.status = self._parser.get_status_code()
            exchange.is_stream = exchange.status == 200 and exchange.content_type.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the body, free of its chunk framing."""
        exchange = self._exchange
        if exchange is None:
            return
        if not exchange.is_stream:
            if sum(map(len, exchange.body)) < _MAX_ERROR_BODY_BYTES:
                exchange.body.append(body)
            return
        payloads = exchange.sse.feed(body)
        if len(payloads) == 1:
            exchange.payloads.append(payloads[0])
            exchange.times_s.append(self._now_s)
        elif payloads:
            exchange.payloads += payloads
            exchange.times_s += [self._now_s] * len(payloads)
        if len(exchange.payloads) >= _DECODE_BATCH:
            self._pump.add(exchange)

    def on_message_complete(self) -> None:
        """httptools: the answer is complete."""
        if not self._parser.should_keep_alive():
            self.is_open = False
        self._end(self._now_s)
        if not self.is_open:
            self._wire.close()

    def lost(self, error: OSError | None) -> None:
        """The connection has ended: that ends the answer too, well only if nothing else could."""
        self.is_open = False
        exchange = self._exchange
        if exchange is None:
            return
        now_s = perf_counter()
        if self._ends_with_close and exchange.status and error is None:
            self._end(now_s)
        elif self.num_requests > 1 and exchange.num_reads == 0:
            self._end(now_s, "stale", "the kept connection was closed before the answer began")
        else:
            self._end(now_s, "cut", f"the connection was closed in mid-answer ({exchange.num_reads} reads)")

    def _end(self, now_s: float, kind: str | None = None, text: str = "") -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(now_s, kind, text)
