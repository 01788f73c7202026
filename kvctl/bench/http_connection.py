"""One HTTP/1.1 connection that carries one request at a time and times what comes back.

The moment of an event is when the bytes that completed it arrived: one moment per read, as `wire` tells it. So reads in
mid-stream are looked through some at a time, which costs no accuracy and less than one by one. Heads, and bodies
that are no stream in chunks, are read by httptools; the chunks of a stream by `chunked_body`, but for the usual read,
one chunk with one event in it, which is taken apart here. Knows HTTP and where events end; knows nothing of their
content (`stream_decoder`) or of load. Floor 3.
"""

import asyncio
from functools import lru_cache
from time import perf_counter

import httptools

from kvctl.bench.chunked_body import BadChunk, ChunkedBody
from kvctl.bench.sse import SseParser
from kvctl.bench.stream_decoder import StreamDecoder
from kvctl.bench.wire import ArrivalClock, Read, Wire

_MAX_ERROR_BODY_BYTES = 16 * 1024
_EVENT_END = b"\n\n\r\n"  # of an event and of its chunk; a body never ends with it


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
        "place_wait_s",
        "request_id",
        "retry_after_s",
        "sent_s",
        "sse",
        "status",
    )

    def __init__(self, request_id: str, due_s: float, decoder: StreamDecoder, finished: "asyncio.Future[None]") -> None:
        self.request_id = request_id
        self.due_s = due_s
        self.sent_s = 0.0
        self.connect_s = 0.0  # how long connecting took; 0.0 on a connection that was open
        self.place_wait_s = 0.0  # how long it waited for a place under a cap on requests in flight
        self.end_s = 0.0
        self.status = 0
        self.content_type = b""
        self.retry_after_s = 0.0
        self.is_stream = False
        self.sse = SseParser()
        self.decoder = decoder
        self.body: list[bytes] = []  # of an answer that is no stream
        self.error_kind: str | None = None
        self.error_text = ""
        self.finished = finished

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

    def _body_text(self) -> str:
        return b"".join(self.body).decode("utf-8", "replace")[:300].strip()


@lru_cache(maxsize=4096)
def _usual_start(num_bytes: int) -> bytes:
    """How a read of so many bytes begins that is one chunk with one event in it."""
    for digits in range(1, 9):
        size = num_bytes - digits - 4  # two line ends of two bytes
        if size > 0 and len(f"{size:x}") == digits:
            return b"%x\r\ndata: " % size
    return b"\0"  # no read begins so


class HttpConnection:
    """A keep-alive connection. httptools calls the `on_*` methods while `receive` feeds it."""

    __slots__ = (
        "_chunks",
        "_clock",
        "_ends_with_close",
        "_exchange",
        "_has_answer",
        "_has_body",
        "_has_head",
        "_is_between",
        "_is_chunked",
        "_now_s",
        "_parser",
        "_wire",
        "is_open",
        "num_requests",
    )

    def __init__(self, clock: ArrivalClock) -> None:
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._wire: Wire
        self._now_s = 0.0
        self._ends_with_close = False
        self._is_chunked = False
        self._has_answer = False  # a byte of it has come
        self._has_head = False
        self._has_body = False  # httptools has seen a part of the body: it reads the rest too
        self._chunks: ChunkedBody | None = None  # reads the body instead of httptools
        self._is_between = False  # the next byte begins a chunk and, in it, an event
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
        self._has_answer = self._has_head = self._has_body = self._ends_with_close = self._is_chunked = False
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
        self._wire.abort()
        self._end(perf_counter(), kind, text)

    def close(self) -> None:
        """Close an idle connection."""
        self.is_open = False
        self._wire.close()

    def receive(self, reads: list[Read]) -> None:
        """Take bytes of the answer: the reads of a stream some at a time, others one by one."""
        exchange = self._exchange
        if exchange is None:  # nobody asked
            self.close()
            return
        moments_s = self._clock.arrivals_s(reads)
        if self._chunks is not None:
            self._take_chunks(exchange, [read[0] for read in reads], moments_s)
            return
        for (data, _, _), moment_s in zip(reads, moments_s, strict=True):
            self._now_s = moment_s
            self._has_answer = True
            if self._has_head:
                self._feed_parser(data)
            else:
                self._receive_head(exchange, data)

    def _receive_head(self, exchange: Exchange, data: bytes) -> None:
        """Let httptools read the head and no more, so that a stream in chunks can be read without it."""
        end = data.find(b"\r\n\r\n")
        head_end = end + 4 if end >= 0 else len(data)
        self._feed_parser(data[:head_end])
        if self._has_head and self._is_chunked and exchange.is_stream and not self._has_body and end >= 0:
            self._chunks = ChunkedBody()
            self._wire.keep_reads(_EVENT_END)
            self._take_chunks(exchange, [data[head_end:]], [self._now_s])
        elif head_end < len(data) and self._exchange is exchange:
            self._feed_parser(data[head_end:])

    def _take_chunks(self, exchange: Exchange, pieces: list[bytes], moments_s: list[float]) -> None:
        chunks, sse = self._chunks, exchange.sse
        assert chunks is not None
        times_s: list[float] = []
        payloads: list[bytes] = []
        broken: BadChunk | None = None
        for data, moment_s in zip(pieces, moments_s, strict=True):
            if self._is_between:
                start = _usual_start(len(data))
                if data.startswith(start) and data.endswith(_EVENT_END):
                    payload = data[len(start) : -4]
                    if b"\n" not in payload and b"\r" not in payload:
                        payloads.append(payload)
                        times_s.append(moment_s)
                        continue
            self._now_s = moment_s
            try:
                found = [payload for content in chunks.feed(data) for payload in sse.feed(content)]
            except BadChunk as error:
                broken = error
                break
            self._is_between = chunks.is_between and sse.is_between
            payloads += found
            times_s += [moment_s] * len(found)
        if payloads:
            exchange.decoder.decode(times_s, payloads)
        if broken is not None:
            self.abort("protocol", f"not HTTP/1.1: {broken}")
        elif chunks.is_complete:
            self._chunks, self._is_between = None, False
            self._wire.keep_reads(None)
            keeps_alive = self._parser.should_keep_alive()
            self._parser = httptools.HttpResponseParser(self)  # the old one still waits for this body
            self._complete(keeps_alive)

    def _feed_parser(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a fault of ours, not of the server
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
        elif name == b"transfer-encoding":
            self._ends_with_close = False
            self._is_chunked = value.lower().strip() == b"chunked"
        elif name == b"content-length":
            self._ends_with_close = False

    def on_message_begin(self) -> None:
        """httptools: an answer begins."""
        self._ends_with_close = True  # until a header says how long the body is

    def on_headers_complete(self) -> None:
        """httptools: all headers are in."""
        exchange = self._exchange
        if exchange is not None:
            self._has_head = True
            exchange.status = self._parser.get_status_code()
            exchange.is_stream = exchange.status == 200 and exchange.content_type.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the body, free of its chunk framing."""
        self._has_body = True
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.is_stream:
            payloads = exchange.sse.feed(body)
            exchange.decoder.decode([self._now_s] * len(payloads), payloads)
        elif sum(map(len, exchange.body)) < _MAX_ERROR_BODY_BYTES:
            exchange.body.append(body)

    def on_message_complete(self) -> None:
        """httptools: the answer is complete."""
        self._complete(self._parser.should_keep_alive())

    def _complete(self, keeps_alive: bool) -> None:
        if not keeps_alive:
            self.is_open = False
        self._end(self._now_s)
        if not self.is_open:
            self._wire.close()

    def lost(self, error: OSError | None) -> None:
        """The connection has ended: that ends the answer too, well only if nothing else could."""
        self.is_open = False
        if self._exchange is None:
            return
        now_s = perf_counter()
        if self._ends_with_close and self._has_head and error is None:
            self._end(now_s)
        elif self.num_requests > 1 and not self._has_answer:
            self._end(now_s, "stale", "the kept connection was closed before the answer began")
        else:
            self._end(now_s, "cut", "the connection was closed in mid-answer")

    def _end(self, now_s: float, kind: str | None = None, text: str = "") -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(now_s, kind, text)
