"""The engine process: builds the core, then steps it as long as there is work. Also how a parent starts it.

Knows no HTTP, no text and no asyncio. `spawn_engine()` runs in the parent and starts a fresh interpreter (never a
fork: the parent has threads); everything else runs in the child.

* The parent leads: SIGINT and SIGTERM, which a terminal or a service manager sends to both, are ignored here.
* The child never outlives the parent: a thread sleeps until the socket hangs up and then ends the process, also in
  the middle of a step.
* One message out per step. A parent that reads slowly does not stall a step until 64 MiB wait for it.
* An error that belongs to one request rejects that request. An error in a step ends the process: the state behind
  it can no longer be trusted.

Floor 2; torch comes in only through the builder that the parent names.
"""

import contextlib
import faulthandler
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

from kvctl.core.engine_core import Clock
from kvctl.core.request import Request
from kvctl.core.step import StepResult
from kvctl.engine.config import EngineConfig, EngineInfo
from kvctl.engine.wire import (
    AbortRequests,
    EngineFailed,
    EngineReady,
    EngineRequest,
    FrameReader,
    FromEngine,
    ReportLine,
    RequestRejected,
    StartEngine,
    StepDone,
    StopEngine,
    ToEngine,
    WireError,
    decode_to_engine,
    encode_frame,
)
from kvctl.errors import EngineDead, KvctlError

_READ_BYTES: Final = 1 << 18
_MAX_UNSENT_BYTES: Final = 64 << 20
_POLLRDHUP: Final[int] = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere a hang-up is reported unasked


class Core(Protocol):
    """What the loop drives: `core.engine_core.EngineCore`, or a test's own."""

    def add(self, request: Request) -> None:
        """Take a request. Raises InvalidRequest if it can never be served."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks; unknown ids are ignored."""
        ...

    def has_work(self) -> bool:
        """Whether a step would compute something."""
        ...

    def step(self) -> StepResult:
        """Compute one step."""
        ...


DEFAULT_BUILDER: Final = "kvctl.engine.build:build_engine_core"
Builder = Callable[[EngineConfig, Clock, Callable[[str], None]], tuple[Core, EngineInfo]]


# ---- in the parent ----


@dataclass(frozen=True, slots=True)
class SpawnedEngine:
    """An engine process that imports what it needs and waits for `StartEngine` on the parent's end of its socket."""

    process: subprocess.Popen[bytes]
    connection: socket.socket


def spawn_engine(builder: str = DEFAULT_BUILDER) -> SpawnedEngine:
    """Start the engine process, with the parent's `sys.path`. Its output goes to stderr.

    A server calls this before it looks for its model: importing torch takes longer than all of that. A process
    that is never used ends with the parent, or when its socket is closed.

    Args:
        builder: "package.module:function" with the signature of `engine.build.build_engine_core`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
        command = [sys.executable, "-P", "-m", "kvctl.engine.engine_process", str(theirs.fileno()), builder]
        # A Ctrl-C before the child ignores SIGINT would kill it: it starts with the signal blocked.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, env=environment
            )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return SpawnedEngine(process, ours)


def describe_exit(return_code: int | None) -> str:
    """Say how the engine process ended."""
    if return_code is None:
        return "the engine process closed its socket"
    if return_code < 0:
        try:
            name = signal.Signals(-return_code).name
        except ValueError:
            name = f"signal {-return_code}"
        return f"the engine process was killed by {name}"
    return f"the engine process ended with exit code {return_code}"


# ---- in the engine process ----


class _ParentGone(Exception):
    """The socket is at its end: nobody is there to work for."""


class _Channel:
    """The child's end of the socket: reads without waiting unless told to, writes without waiting if it can."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader = FrameReader()
        self._put_back: list[ToEngine] = []
        self._unsent = bytearray()
        self._poll = select.poll()

    def put_back(self, messages: list[ToEngine]) -> None:
        """Have the next `receive` return these first."""
        self._put_back = messages

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """Return the messages that have arrived; with `wait`, at least one.

        Raises:
            _ParentGone: the parent has ended.
        """
        while True:
            frames: list[bytes] = []
            while True:
                try:
                    data = self._socket.recv(_READ_BYTES)
                except BlockingIOError:
                    break
                except ConnectionError as error:
                    raise _ParentGone from error
                if not data:
                    raise _ParentGone
                frames += self._reader.feed(data)
                if len(data) < _READ_BYTES:
                    break
            if self._unsent:
                self._flush()
            if frames or self._put_back or not wait:
                earlier, self._put_back = self._put_back, []
                return earlier + [decode_to_engine(frame) for frame in frames]
            self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def send(self, message: FromEngine) -> None:
        """Send one message, or keep it for later where the parent is slow.

        Raises:
            _ParentGone: the parent has ended.
        """
        self._unsent += encode_frame(message)
        self._flush()
        while len(self._unsent) > _MAX_UNSENT_BYTES:
            self._wait(select.POLLOUT)
            self._flush()

    def drain(self) -> None:
        """Wait until everything is sent.

        Raises:
            _ParentGone: the parent has ended.
        """
        while self._unsent:
            self._wait(select.POLLOUT)
            self._flush()

    def _wait(self, events: int) -> None:
        self._poll.register(self._socket, events)
        self._poll.poll()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise _ParentGone from error


def _exit_with_parent(connection: socket.socket) -> None:
    """Sleep until the parent's end of the socket is closed, then end this process at once."""
    hang_up = select.poll()
    hang_up.register(connection, _POLLRDHUP)
    hang_up.poll()
    os._exit(0)


def _load_builder(name: str) -> Builder:
    module_name, _, function_name = name.partition(":")
    builder: Builder = getattr(import_module(module_name), function_name)
    return builder


def _add(core: Core, channel: _Channel, message: EngineRequest) -> None:
    """Give a request to the core; what goes wrong here belongs to this request alone."""
    try:
        core.add(message.to_request())
    except KvctlError as error:
        channel.send(RequestRejected(message.request_id, WireError.of(error)))
    except Exception as error:
        _log(f"request {message.request_id} was rejected by a bug:\n{traceback.format_exc()}")
        text = f"the engine could not take the request: {type(error).__name__}: {error}"
        channel.send(RequestRejected(message.request_id, WireError("KvctlError", text)))


def run_loop(core: Core, channel: _Channel) -> None:
    """Take messages and step the core until told to stop. Sleeps while there is no work.

    Raises:
        _ParentGone: the parent has ended.
        Exception: whatever a step raises.
    """
    while True:
        aborted = False
        for message in channel.receive(wait=not core.has_work()):
            match message:
                case EngineRequest():
                    _add(core, channel, message)
                case AbortRequests():
                    aborted = True
                    for request_id in message.request_ids:
                        core.abort(request_id)
                case StopEngine():
                    return
                case StartEngine():
                    raise EngineDead("the engine was told to start twice")
        if aborted or core.has_work():  # after an abort also without work: the gauges must not keep its blocks
            channel.send(StepDone(core.step()))


def _log(text: str) -> None:
    print(f"kvctl engine: {text}", file=sys.stderr, flush=True)


def _build(builder_name: str, channel: _Channel) -> tuple[Core, EngineInfo]:
    builder = _load_builder(builder_name)  # imports torch, while the parent still makes up its mind
    messages = channel.receive(wait=True)
    start = messages[0]
    channel.put_back(messages[1:])  # requests may follow at once
    if not isinstance(start, StartEngine):
        raise EngineDead(f"the engine was not told what to start, but got {type(start).__name__}")
    return builder(start.config, time.monotonic, lambda line: channel.send(ReportLine(line)))


def serve(connection: socket.socket, builder_name: str) -> int:
    """Build the engine and run it over `connection`; return the exit code of the process."""
    channel = _Channel(connection)
    is_built = False
    try:
        core, info = _build(builder_name, channel)
        is_built = True
        gc.collect()
        gc.freeze()  # what was built stays: the collector need not look at it again during steps
        channel.send(EngineReady(info))
        run_loop(core, channel)
    except _ParentGone:
        return 0
    except Exception as error:
        failure = WireError.of(error) if isinstance(error, KvctlError) and not is_built else _bug(error)
        with contextlib.suppress(_ParentGone):
            channel.send(EngineFailed(failure))
            channel.drain()
        return 1
    return 0


def _bug(error: Exception) -> WireError:
    """Put an error that nobody expected into the log, and name it for the parent."""
    _log(f"died:\n{traceback.format_exc()}")
    text = f"the engine failed: {type(error).__name__}: {error}"
    return WireError("EngineDead", text, "The traceback is in the log (stderr).")


def main(argv: list[str]) -> int:
    """Run as the engine process; `argv`: the inherited socket's file descriptor, and the builder's name."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()  # a crash in native code leaves the Python stack in the log
    connection = socket.socket(fileno=int(argv[0]))
    connection.set_inheritable(False)  # a compiler started from here must not keep the line open
    threading.Thread(target=_exit_with_parent, args=(connection,), daemon=True, name="parent-watch").start()
    return serve(connection, argv[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
