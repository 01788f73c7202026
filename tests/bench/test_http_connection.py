"""A connection fed by hand: every way a stream may be framed and cut gives the same events at the right moments."""

import json
import struct
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.bench.http_connection import Exchange, HttpConnection
from kvctl.bench.stream_decoder import StreamDecoder
from kvctl.bench.wire import ArrivalClock

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Future:
    is_done = False

    def done(self):
        return self.is_done

    def set_result(self, _):
        self.is_done = True


class FakeWire:
    kept_ending = None
    is_aborted = False

    def send(self, data):
        pass

    def keep_reads(self, ending):
        self.kept_ending = ending

    def close(self):
        pass

    def abort(self):
        self.is_aborted = True


def event(text, **more):
    choice = {"index": 0, "text": text, "finish_reason": None}
    return b"data: " + json.dumps({"id": "c", "choices": [choice], **more}).encode() + b"\n\n"


def chunk(data, size="%x"):
    return (size % len(data)).encode() + b"\r\n" + data + b"\r\n"


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@pytest.fixture
def connection():
    made = HttpConnection(ArrivalClock())
    made.attach(FakeWire())
    return made


def start(connection):
    exchange = Exchange("x", 0.0, StreamDecoder(keep_times=True), Future())
    connection.send(exchange, b"")
    return exchange


def feed(connection, *pieces):
    for i, piece in enumerate(pieces):
        connection.receive([(piece, None, 100.0 + i)])


TEXTS = ["a", "b c", "ü", '"', "\\", "line\nline"]


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=8),
    st.sampled_from(["%x", "%X", "00%x"]),
    st.lists(st.integers(0, 1500), max_size=10),
)
def test_a_stream_cut_anywhere_is_the_same_stream(texts, size, cuts):
    connection = HttpConnection(ArrivalClock())
    connection.attach(FakeWire())
    stream = HEAD + b"".join(chunk(event(text), size) for text in texts) + END
    for _ in range(2):  # the connection is kept
        exchange = start(connection)
        places = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
        feed(connection, *(stream[a:b] for a, b in pairwise(places) if a < b))
        assert (exchange.error_kind, exchange.decoder.num_events, exchange.decoder.is_done) == (None, len(texts), True)
        assert connection.is_open


def test_each_event_has_the_moment_of_the_read_that_completed_it(connection):
    exchange = start(connection)
    feed(connection, HEAD, chunk(event("a")), chunk(event("b")), chunk(event("c")) + chunk(event("d")), END)
    assert exchange.decoder.token_times_s.tolist() == [101.0, 102.0, 103.0, 103.0]
    assert exchange.decoder.coalesced_events == 1
    assert exchange.end_s == 104.0


def test_an_event_of_several_chunks_and_a_chunk_of_several_events_come_whole(connection):
    exchange = start(connection)
    one = event("first")
    feed(connection, HEAD, chunk(one[:9]), chunk(one[9:]), chunk(event("a") + event("b")), END)
    assert exchange.decoder.num_events == 3


def test_reads_given_out_together_keep_each_its_moment(connection):
    exchange = start(connection)
    feed(connection, HEAD)
    assert connection._wire.kept_ending == b"\n\n\r\n"
    connection.receive([(chunk(event(text)), None, 200.0 + i) for i, text in enumerate("abc")] + [(END, None, 210.0)])
    assert exchange.decoder.token_times_s.tolist() == [200.0, 201.0, 202.0]
    assert connection._wire.kept_ending is None


def test_a_line_end_inside_a_usual_looking_event_is_a_line_end(connection):
    exchange = start(connection)
    feed(connection, HEAD, chunk(event("a")), chunk(b"data: {}\n\ndata: {}\n\n"), chunk(b"data: {\rdata: }\n\n"), END)
    assert exchange.decoder.malformed is None
    assert exchange.decoder.num_events == 1


def test_a_body_that_is_not_framed_as_it_says_is_a_protocol_error(connection):
    exchange = start(connection)
    feed(connection, HEAD, chunk(event("a")), b"what is this\r\n")
    assert exchange.error_kind == "protocol"
    assert exchange.decoder.num_events == 1  # what came before it counts
    assert connection._wire.is_aborted


def test_a_server_that_closes_after_the_answer_is_not_asked_again(connection):
    exchange = start(connection)
    feed(connection, HEAD[:-2] + b"connection: close\r\n\r\n" + chunk(event("a")) + END)
    assert exchange.error_kind is None
    assert not connection.is_open


def test_a_fault_of_ours_in_reading_is_no_fault_of_the_server(connection):
    exchange = start(connection)
    exchange.decoder = None  # stands for any mistake in the code that is called back
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 20\r\n\r\n"
    with pytest.raises(Exception) as raised:
        feed(connection, head + b"data: {}\n\n")
    assert isinstance(raised.value.__context__, AttributeError)
    assert exchange.error_kind is None


def test_a_kernel_without_stamps_is_read_by_the_clock_of_the_read_and_says_so(connection):
    clock = connection._clock
    now_s = time.perf_counter()
    wall_ns = time.time_ns()
    stamp = struct.pack("@qq", *divmod(wall_ns - 1_000_000, 10**9))
    assert clock.arrivals_s([(b"", stamp, now_s)])[0] == pytest.approx(now_s - 0.001, abs=1e-3)
    assert clock.arrivals_s([(b"", stamp, now_s), (b"", None, now_s + 1)]) == [now_s, now_s + 1]
    assert not clock.uses_kernel
