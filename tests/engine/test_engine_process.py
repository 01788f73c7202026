"""The engine process itself, driven over its socket: how it starts, works, ignores, ends and dies."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine import wire
from kvctl.engine.engine_process import describe_exit, spawn_engine
from kvctl.errors import EngineDead, InvalidRequest, ModelBroken
from tests.support.byte_tokenizer import EOS_ID
from tests.support.fakes import engine_config

BUILDER = "tests.support.fakes:build_echo_core"
ROOT = Path(__file__).parent.parent.parent


class Engine:
    """A blocking client. Every wait has a limit, so that a hang is a failure."""

    def __init__(self, builder=BUILDER, **config):
        spawned = spawn_engine(builder)
        self.process, self.socket = spawned.process, spawned.connection
        self.socket.settimeout(20)
        self.reader = wire.FrameReader()
        self.messages = []
        self.send(wire.StartEngine(engine_config(**config)))

    def send(self, message):
        self.socket.sendall(wire.encode_frame(message))

    def add(self, request_id, prompt, **params):
        sampling = SamplingParams(**({"max_tokens": 4} | params))
        self.send(
            wire.EngineRequest(request_id, list(prompt), sampling, time.monotonic(), 0, None, frozenset({EOS_ID}))
        )

    def receive(self):
        while not self.messages:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self.messages += map(wire.decode_from_engine, self.reader.feed(data))
        return self.messages.pop(0)

    def until(self, kind):
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message

    def finish(self, *request_ids):
        """Read steps until these requests have ended; return all tokens by request, and the last step."""
        tokens, open_ids = {}, set(request_ids)
        while open_ids:
            step = self.until(wire.StepDone).result
            for output in step.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    open_ids.discard(output.request_id)
        return tokens, step

    def exit_code(self):
        return self.process.wait(timeout=20)

    def close(self):
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start():
    engines = []

    def make(**options):
        engines.append(Engine(**options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(start):
    engine = start()
    engine.until(wire.EngineReady)
    return engine


def test_it_reports_and_says_what_it_built(start):
    engine = start()
    assert engine.receive() == wire.ReportLine("fake engine: no weights")
    ready = engine.receive()
    assert ready.info.architecture == "EchoForCausalLM"


def test_requests_run_side_by_side_and_leave_nothing_behind(engine):
    engine.add("a", b"abc", max_tokens=7)
    engine.add("b", b"xy", max_tokens=3)
    tokens, last = engine.finish("a", "b")
    assert (bytes(tokens["a"]), bytes(tokens["b"])) == (b"abcabca", b"xyx")
    assert last.stats.num_free_blocks == last.stats.num_usable_blocks
    engine.send(wire.StopEngine())
    assert engine.exit_code() == 0


def test_an_abort_frees_the_blocks_within_one_step(engine):
    engine.add("slow", b"\x03" + b"x" * 40, max_tokens=400)
    while not engine.until(wire.StepDone).result.outputs:
        pass
    engine.send(wire.AbortRequests(["slow", "unknown"]))
    for _ in range(3):  # one step may have been under way, one message on the line
        stats = engine.until(wire.StepDone).result.stats
        if stats.num_running == 0:
            break
    assert stats.num_running == 0
    assert stats.num_free_blocks == stats.num_usable_blocks


def test_a_request_that_can_never_fit_ends_alone(start):
    engine = start(num_blocks=5)
    engine.until(wire.EngineReady)
    engine.add("good", b"abc")
    engine.add("huge", b"x" * 200)
    engine.add("twice", b"abc")
    engine.add("twice", b"abc")
    refused = [engine.until(wire.RequestRejected) for _ in range(2)]
    assert [message.request_id for message in refused] == ["huge", "twice"]
    assert "KV cache" in refused[0].error.message and refused[0].error.param == "input_tokens"


def test_a_request_that_trips_a_bug_while_it_is_added_ends_alone(capfd, start):
    engine = start(builder="tests.support.fakes:build_picky_core")
    engine.until(wire.EngineReady)
    engine.add("good", b"abc", max_tokens=50)
    engine.add("refused", b"abc")
    refused = engine.until(wire.RequestRejected)
    assert (refused.request_id, refused.error.class_name, refused.error.param) == (
        "refused",
        "InvalidRequest",
        "request_id",
    )
    engine.add("bug", b"abc")
    rejected = engine.until(wire.RequestRejected)
    assert (rejected.request_id, rejected.error.class_name) == ("bug", "KvctlError")
    assert "TypeError: a bug while adding" in rejected.error.message
    assert "Traceback" in capfd.readouterr().err
    engine.add("late", b"abc", max_tokens=50)
    tokens, _ = engine.finish("late")
    assert len(tokens["late"]) == 50


@pytest.mark.parametrize(
    ("folder", "kind", "message", "hint"),
    [
        ("broken", ModelBroken, "model.safetensors is missing", "Fetch it again."),
        ("bug", EngineDead, "the engine failed: ZeroDivisionError: a bug while building", "The traceback is"),
    ],
)
def test_a_failed_start_says_why_as_the_same_class(capfd, start, folder, kind, message, hint):
    engine = start(folder=folder)
    error = engine.until(wire.EngineFailed).error.to_exception()
    assert engine.exit_code() == 1
    assert type(error) is kind
    assert error.message == message
    assert error.hint.startswith(hint)
    assert ("Traceback" in capfd.readouterr().err) == (folder == "bug")


@pytest.mark.parametrize(
    ("builder", "word"), [("tests.support.fakes:nothing", "'nothing'"), ("missing.module:f", "'missing'")]
)
def test_a_builder_that_does_not_exist_is_named(capfd, start, builder, word):
    engine = start(builder=builder)
    assert word in engine.until(wire.EngineFailed).error.message
    assert engine.exit_code() == 1
    assert "Traceback" in capfd.readouterr().err


def test_one_that_is_never_told_to_start_ends_with_its_line():
    spawned = spawn_engine(BUILDER)
    spawned.connection.close()
    assert spawned.process.wait(timeout=20) == 0


def test_an_error_in_a_step_ends_the_process_loudly(capfd, start):
    engine = start()
    engine.add("bad", b"\x01boom")
    error = engine.until(wire.EngineFailed).error
    assert (error.class_name, error.message) == (
        "EngineDead",
        "the engine failed: RuntimeError: the runner was asked to fail",
    )
    assert engine.exit_code() == 1
    log = capfd.readouterr().err
    assert "kvctl engine: died:" in log
    assert "Traceback" in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_parent_leads_so_signals_to_both_are_ignored(engine, number):
    engine.process.send_signal(number)
    engine.add("a", b"abc")
    tokens, _ = engine.finish("a")
    assert bytes(tokens["a"]) == b"abca"


def test_a_ctrl_c_while_the_interpreter_starts_is_ignored_too(start):
    engine = start()
    for _ in range(20):
        engine.process.send_signal(signal.SIGINT)
        time.sleep(0.005)
    assert engine.until(wire.EngineReady)


def test_without_work_it_sleeps(engine):
    engine.add("a", b"abc")
    engine.finish("a")
    process = psutil.Process(engine.process.pid)
    before = process.cpu_times()
    time.sleep(0.3)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.1  # a loop that polls would have used 0.3


def test_it_ends_when_the_parent_closes_the_line(engine):
    engine.socket.close()
    assert engine.exit_code() == 0


def test_it_never_outlives_a_parent_that_is_killed():
    """A parent of its own, killed with SIGKILL so that it can clean up nothing; idle, busy and building engines."""
    code = """
        import time
        from tests.engine.test_engine_process import Engine, wire
        building, idle, busy = Engine(folder="slow"), Engine(), Engine()
        idle.until(wire.EngineReady)
        busy.add("slow", bytes([3, 4, 5]), max_tokens=500)
        busy.until(wire.StepDone)
        print(*(engine.process.pid for engine in (building, idle, busy)), flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with parent:
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(children) == 3
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_nothing_is_left_in_the_file_system(engine):
    engine.add("a", b"abc")
    engine.finish("a")
    paths = [connection.laddr for connection in psutil.Process(engine.process.pid).net_connections(kind="unix")]
    assert [path for path in paths if path] == []


def test_a_parent_that_does_not_read_does_not_stall_the_engine(engine):
    engine.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for index in range(8):
        engine.add(f"r{index}", b"abc", max_tokens=400, logprobs=0)
    time.sleep(0.5)  # far more output than the socket holds waits now
    tokens, last = engine.finish(*(f"r{index}" for index in range(8)))
    assert {len(ids) for ids in tokens.values()} == {400}
    assert last.stats.num_free_blocks == last.stats.num_usable_blocks


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-11, "killed by SIGSEGV"), (-99, "signal 99"), (None, "closed")],
)
def test_how_it_ended_is_said_in_words(code, words):
    assert words in describe_exit(code)


def test_an_invalid_request_keeps_its_field_across_the_line():
    sent = wire.RequestRejected("r", wire.WireError.of(InvalidRequest("no", param="top_p")))
    (payload,) = wire.FrameReader().feed(wire.encode_frame(sent))
    error = wire.decode_from_engine(payload).error.to_exception()
    assert isinstance(error, InvalidRequest)
    assert error.param == "top_p"
