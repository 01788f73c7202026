"""Whole loads against the scripted server in another process: special streams, faults, loops, sessions.

Moments are compared with the script's lower bounds and with the server's log, never with a wall-clock budget.
"""

import itertools
import socket
import threading
from dataclasses import replace

import httpx
import pytest

from kvctl.bench.client import ClientConfig, LoadClient
from kvctl.bench.load_process import LoadJob, run_load, split_job
from kvctl.bench.mock_process import start_mock_process
from kvctl.bench.mock_script import MockScript
from kvctl.bench.run_config import PATHS, LoadConfig, RequestConfig
from kvctl.bench.workload_choice import WorkloadChoice
from kvctl.workload.arrivals import ArrivalSpec
from kvctl.workload.datasets import Dataset
from kvctl.workload.lengths import LengthSpec
from kvctl.workload.prompts import TokenRate
from kvctl.workload.request_plan import Session, Turn
from kvctl.workload.workload_profile import WorkloadClass, WorkloadProfile


def profile(**fields):
    kind = WorkloadClass("t", LengthSpec.fixed(10), LengthSpec.fixed(8), **fields)
    return WorkloadChoice(WorkloadProfile("t", (kind,)))


def job(url, *, endpoint="completions", workload=None, client=None, request=None, **load):
    fields = {"num_requests": 4, "ramp_s": 0.0, **load}
    if "arrivals" not in fields and "replay" not in fields:
        fields.setdefault("concurrency", 2)
    return LoadJob(
        client=ClientConfig(url, path=PATHS[endpoint], timeout_s=20, **(client or {})),
        load=LoadConfig(**fields),
        request=RequestConfig(endpoint=endpoint, **(request or {})),
        workload=workload or profile(),
        rate=TokenRate(),
        id_prefix="t",
    )


def rows_of(measured):
    return list(measured.rows.rows())


def test_a_role_delta_at_once_is_not_the_first_token(mock_server):
    for row in rows_of(run_load(job(mock_server(ttft_s=0.05), endpoint="chat"))):
        assert row.latencies_s()["ttft"] > 0.0495  # the role came 50 ms earlier
        assert row.num_events == 8


def test_reasoning_first_gives_ttft_and_a_later_ttfo(mock_server):
    url = mock_server(reasoning_tokens=4, gap_s=0.01)
    for row in rows_of(run_load(job(url, endpoint="chat"))):
        found = row.latencies_s()
        assert row.reasoning_events == 4
        assert found["ttfo"] - found["ttft"] > 0.03
        assert found["ttft"] < found["ttfo"]


def test_four_tokens_per_event_are_told_by_usage(mock_server):
    url = mock_server(tokens_per_event=4)
    for request in ({}, {"continuous_usage": True}):
        for row in rows_of(run_load(job(url, request=request))):
            assert (row.num_events, row.output_tokens, row.first_event_tokens) == (2, 8, 4)


def test_without_usage_events_are_the_tokens(mock_server):
    row = rows_of(run_load(job(mock_server(usage=False))))[0]
    assert (row.is_completed, row.output_tokens, row.prompt_tokens) == (True, 8, -1)


def test_moments_are_those_of_the_servers_log():
    with start_mock_process(MockScript(ttft_s=0.02, gap_s=0.005, tokens=6)) as url:
        measured = run_load(replace(job(url, concurrency=8, num_requests=24), keep_times=True))
        log = httpx.get(f"{url}/mock/log", trust_env=False).json()
    written = {request_id: times for request_id, _, times in log["streams"]}
    assert log["max_running"] == measured.max_in_flight == 8
    late = []
    for number, times in measured.token_times_s.items():
        truth = written[f"t-{number}"]
        assert len(truth) == len(times)
        assert all(seen >= wrote - 0.002 for seen, wrote in zip(times, truth, strict=True))
        late += [seen - wrote for seen, wrote in zip(times, truth, strict=True)]
    assert measured.uses_kernel_clock
    assert sorted(late)[len(late) // 2] < 0.002  # by the kernel's clock this does not depend on how busy we are


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("error", "stream_error"),
        ("cut", "cut"),
        ("429", "http_429"),
        ("503", "http_503"),
        ("500", "http_500"),
        ("html", "not_a_stream"),
    ],
)
def test_a_failure_is_counted_by_its_kind_and_pollutes_no_latency(mock_server, fault, kind):
    url = mock_server(fault=fault, retry_after_s=0.01)
    measured = run_load(job(url, max_error_rate=None))
    assert dict(measured.errors) == {kind: 4}
    assert measured.error_texts[kind]
    assert measured.gaps.count == 0
    assert {row.error_kind for row in rows_of(measured)} == {kind}


def test_a_mix_of_good_and_bad_keeps_both_apart(mock_server):
    url = mock_server(fault="cut", fault_share=0.5, seed=3)
    measured = run_load(job(url, num_requests=40, concurrency=8, max_error_rate=None))
    failed = sum(not row.is_completed for row in rows_of(measured))
    assert 5 < failed < 35
    assert measured.errors["cut"] == failed
    assert measured.gaps.count == (40 - failed) * 7


def test_a_server_that_never_answers_ends_as_a_timeout(mock_server):
    one = job(mock_server(fault="hang"), num_requests=2)
    measured = run_load(replace(one, client=replace(one.client, timeout_s=0.1)))
    assert dict(measured.errors) == {"timeout": 2}


def test_retry_after_is_waited_for(mock_server):
    url = mock_server(fault="429", retry_after_s=0.2)
    measured = run_load(job(url, concurrency=1, num_requests=3, max_error_rate=None))
    sent = [row.sent_s for row in rows_of(measured)]
    assert all(later - earlier > 0.199 for earlier, later in itertools.pairwise(sent))


def test_a_hopeless_run_stops_by_itself(mock_server):
    measured = run_load(job(mock_server(fault="500"), num_requests=10_000, concurrency=20, max_error_rate=0.5))
    assert measured.stopped_by_errors
    assert len(measured.rows) < 200


def test_events_in_slow_pieces_and_of_a_megabyte_come_whole(mock_server):
    for url, size in ((mock_server(trickle_bytes=16), 1), (mock_server(event_bytes=1 << 20, tokens=3), 3)):
        measured = run_load(job(url, num_requests=2))
        assert not measured.errors
        assert all(row.num_events in (8, size) for row in rows_of(measured))


def test_nothing_listening_is_a_failed_connection_and_not_a_crash():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    measured = run_load(job(f"http://127.0.0.1:{port}", num_requests=2, max_error_rate=None))
    assert dict(measured.errors) == {"connect": 2}


def test_a_server_that_does_not_speak_http_is_told(serve_bytes):
    measured = run_load(job(serve_bytes(b"220 mail.example ESMTP\r\n"), num_requests=2, max_error_rate=None))
    assert dict(measured.errors) == {"protocol": 2}


def test_a_stream_that_ends_early_though_properly_is_incomplete(serve_bytes):
    body = b'data: {"choices": [{"text": "a"}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body)
    measured = run_load(job(serve_bytes(head + body), num_requests=2, max_error_rate=None))
    assert dict(measured.errors) == {"incomplete": 2}


def test_a_body_that_ends_with_the_connection_is_complete(serve_bytes):
    body = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    measured = run_load(job(serve_bytes(head + body), num_requests=3, max_error_rate=None))
    assert not measured.errors
    assert len(measured.rows) == 3


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced(serve_bytes):
    body = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body)
    measured = run_load(job(serve_bytes(head + body), num_requests=6, concurrency=1, max_error_rate=None))
    assert not measured.errors  # the server closes after each answer without saying so
    assert measured.num_connections == 6


def test_connections_are_kept_or_not_as_asked(mock_server):
    url = mock_server()
    assert run_load(job(url, num_requests=6, concurrency=2)).num_connections == 2
    assert run_load(job(url, num_requests=6, concurrency=2, client={"keep_alive": False})).num_connections == 6


def test_an_open_loop_sends_what_is_due_when_it_is_due(mock_server):
    spec = ArrivalSpec.steady(100.0, "constant")
    measured = run_load(job(mock_server(), arrivals=spec, num_requests=30))
    rows = sorted(rows_of(measured), key=lambda row: row.due_s)
    assert [round(row.due_s - rows[0].due_s, 6) for row in rows] == [round(i / 100, 6) for i in range(30)]
    assert all(row.sent_s >= row.due_s - 30e-6 for row in rows)


def test_a_cap_makes_requests_wait_here_and_ttft_from_due_tells_it(mock_server):
    spec = ArrivalSpec.steady(500.0, "constant")
    measured = run_load(job(mock_server(ttft_s=0.05), arrivals=spec, max_in_flight=2, num_requests=12))
    assert measured.max_in_flight == 2
    last = max(rows_of(measured), key=lambda row: row.due_s)
    found = last.latencies_s()
    assert found["ttft_due"] > found["ttft"] + 0.1  # five rounds of 50 ms before it


def test_what_is_due_but_finds_no_place_before_the_end_is_never_sent(mock_server):
    spec = ArrivalSpec.steady(200.0, "constant")
    one = job(mock_server(ttft_s=0.5), arrivals=spec, max_in_flight=1, num_requests=None, duration_s=0.2)
    measured = run_load(one)
    assert len(measured.rows) + measured.num_never_sent == 40
    assert measured.num_never_sent >= 38


def test_a_trace_is_replayed_at_its_own_times(mock_server):
    entries = tuple(Session((Turn("hi", 4),), due_s=due_s) for due_s in (0.0, 0.03, 0.05))
    choice = WorkloadChoice(dataset=Dataset("x", "jsonl", entries))
    measured = run_load(job(mock_server(), replay=True, workload=choice, num_requests=None, is_finite=True))
    due = sorted(row.due_s for row in rows_of(measured))
    assert [round(at - due[0], 6) for at in due] == [0.0, 0.03, 0.05]


def test_a_duration_ends_the_issuing_and_the_rest_is_drained(mock_server):
    measured = run_load(job(mock_server(ttft_s=0.05), num_requests=None, duration_s=0.3, concurrency=3))
    assert not measured.errors
    assert measured.issue_end_s - measured.start_s == pytest.approx(0.3, abs=1e-6)
    assert measured.end_s > measured.issue_end_s


def test_turns_of_a_session_see_the_answers_before(recorder):
    url, bodies = recorder
    workload = profile(turns=LengthSpec.fixed(3), prefix_groups=1, prefix_tokens=5)
    measured = run_load(job(url, endpoint="chat", workload=workload, concurrency=1, num_requests=3))
    assert not measured.errors
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    assert bodies[2]["messages"][2]["content"] == "answer 0"
    assert bodies[2]["messages"][4]["content"] == "answer 1"
    assert bodies[0]["messages"][1] == bodies[2]["messages"][1]


def test_two_processes_together_do_what_one_does(mock_server):
    measured = run_load(job(mock_server(), num_requests=13, concurrency=5), num_workers=2)
    assert len(measured.rows) == 13
    assert measured.max_in_flight == 5
    assert not measured.errors


def test_parts_of_a_load_add_up():
    one = job("http://127.0.0.1:1", num_requests=11, concurrency=7)
    parts = split_job(one, 3)
    assert sum(part.load.concurrency for part in parts) == 7
    assert sum(part.load.num_requests for part in parts) == 11
    assert len({part.load.seed for part in parts}) == 3
    prefixes = [
        next(replace(part, workload=profile(prefix_groups=1, prefix_tokens=9)).sessions()).turns[0] for part in parts
    ]
    assert len({turn.system for turn in prefixes}) == 1  # one shared prefix for all processes
    assert len({turn.text for turn in prefixes}) == 3


@pytest.fixture
def serve_bytes():
    """A server that answers every connection once with fixed bytes and closes it."""
    listeners = []

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    data = b""
                    while b"\r\n\r\n" not in data:
                        piece = connection.recv(65536)
                        if not piece:
                            break
                        data += piece
                    length = int(data.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                    while len(data.partition(b"\r\n\r\n")[2]) < length:
                        data += connection.recv(65536)
                    connection.sendall(answer)

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.fixture
def recorder():
    """A chat server that keeps the bodies it gets."""
    import json
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    bodies = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            delta = {"choices": [{"delta": {"content": f"answer {len(bodies) - 1}"}, "finish_reason": None}]}
            answer = b"data: " + json.dumps(delta).encode() + b"\n\ndata: [DONE]\n\n"
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_name_with_several_addresses_is_tried_until_one_answers(mock_server, monkeypatch):
    port = mock_server().rpartition(":")[2]

    async def resolve(self):
        self._addresses = ["::1", "127.0.0.1"]

    monkeypatch.setattr(LoadClient, "resolve", resolve)
    measured = run_load(job(f"http://localhost:{port}", num_requests=4))
    assert not measured.errors
    assert len(measured.rows) == 4


def test_the_first_requests_due_are_the_ones_that_are_sent(mock_server):
    spec = ArrivalSpec.steady(1000.0, "constant")
    measured = run_load(job(mock_server(), arrivals=spec, max_in_flight=1, num_requests=5))
    due = sorted(row.due_s for row in rows_of(measured))
    assert [round(at - due[0], 6) for at in due] == [0.0, 0.001, 0.002, 0.003, 0.004]
    assert measured.num_never_sent == 0


def test_what_has_not_ended_when_the_drain_is_over_has_failed(mock_server):
    one = job(mock_server(fault="hang"), num_requests=None, duration_s=0.1, drain_timeout_s=0.1, max_error_rate=None)
    measured = run_load(one)
    assert dict(measured.errors) == {"cancelled": 2}
    assert measured.num_unfinished == 0
    assert "drain" in measured.error_texts["cancelled"]
