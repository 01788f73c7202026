"""The parent's end of the engine process, in asyncio: has it start, sends, dispatches what it says, ends it.

Knows no text and no streams of requests. One `EngineListener` hears everything; `engine_died` is called once, and
never after `stop()` was called. Floor 2, imports no torch.
"""

import asyncio
import contextlib
import signal
import subprocess
from typing import Final, Protocol, cast

from kvctl.core.step import StepResult
from kvctl.engine.config import EngineConfig, EngineInfo
from kvctl.engine.engine_process import SpawnedEngine, describe_exit
from kvctl.engine.wire import (
    EngineFailed,
    EngineReady,
    FrameReader,
    ReportLine,
    RequestRejected,
    StartEngine,
    StepDone,
    StopEngine,
    ToEngine,
    decode_from_engine,
    encode_frame,
)
from kvctl.errors import EngineDead, KvctlError

_EXIT_CODE_WAIT_S: Final = 1.0  # between the end of the socket and the end of the process
_STOP_WAIT_S: Final = 5.0  # for the engine to end by itself, before it is killed


class EngineListener(Protocol):
    """Who hears the engine. All calls come from the event loop."""

    def step_done(self, result: StepResult) -> None:
        """Take the news of one step."""
        ...

    def request_rejected(self, request_id: str, error: KvctlError) -> None:
        """Learn that the core refused a request."""
        ...

    def engine_reported(self, line: str) -> None:
        """Take a line for the log."""
        ...

    def engine_died(self, error: EngineDead) -> None:
        """Learn that no more output will come."""
        ...


class EngineClient(asyncio.Protocol):
    """One engine process. Build it with `await EngineClient.start(...)`."""

    def __init__(self, process: subprocess.Popen[bytes], listener: EngineListener) -> None:
        self._process = process
        self._listener = listener
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._failure: KvctlError | None = None
        self._lost_task: asyncio.Task[None] | None = None
        self._stopping = False
        self.is_alive = False

    @classmethod
    async def start(
        cls, spawned: SpawnedEngine, config: EngineConfig, listener: EngineListener
    ) -> tuple["EngineClient", EngineInfo]:
        """Have a spawned process build its engine, and wait until it is ready.

        Raises:
            KvctlError: what the engine raised while starting, as the same class.
            EngineDead: it ended without a word.
        """
        client = cls(spawned.process, listener)
        try:
            await asyncio.get_running_loop().create_connection(lambda: client, sock=spawned.connection)
            client.send(StartEngine(config))
            info = await client._ready
        except BaseException:
            await client.stop()
            raise
        return client, info

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Send a message; to a process that has ended, to nobody."""
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what `encode_frame` made of a message."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def stop(self) -> None:
        """End the process: asked first, killed after five seconds. Returns when it is gone.

        One that is still starting is killed at once: it does not listen while it loads a model.
        """
        self._stopping = True
        self.is_alive = False
        if not self._ready.done() or self._ready.cancelled():
            self._process.kill()
        self.send(StopEngine())
        try:
            await asyncio.wait_for(self._wait_exit(), _STOP_WAIT_S)
        except TimeoutError:
            self._process.kill()
            await self._wait_exit()
        finally:
            if self._process.poll() is None:  # cancelled while waiting
                self._process.kill()
            if self._transport is not None:
                self._transport.close()
        if self._lost_task is not None:
            await self._lost_task

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to write to."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the class

    def data_received(self, data: bytes) -> None:
        """Dispatch the complete messages."""
        for payload in self._reader.feed(data):
            match decode_from_engine(payload):
                case StepDone(result):
                    self._listener.step_done(result)
                case RequestRejected(request_id, error):
                    self._listener.request_rejected(request_id, error.to_exception())
                case ReportLine(line):
                    self._listener.engine_reported(line)
                case EngineReady(info):
                    self.is_alive = True
                    if not self._ready.done():
                        self._ready.set_result(info)
                case EngineFailed(error):
                    self._failure = error.to_exception()
                    if self._transport is not None:
                        self._transport.abort()  # its last word: a process that cannot end is not waited for

    def connection_lost(self, exc: Exception | None) -> None:
        """Find out how the process ended, then tell the listener."""
        self.is_alive = False
        is_ours = exc is not None and not isinstance(exc, OSError)  # asyncio has logged it; an OSError is its death
        if is_ours and self._failure is None:
            self._failure = EngineDead(f"the line to the engine failed: {type(exc).__name__}: {exc}")
        self._lost_task = asyncio.get_running_loop().create_task(self._report_end())

    async def _report_end(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_exit(), _EXIT_CODE_WAIT_S)
        if self._process.poll() is None:  # the line is cut but it still runs: a bug on this side of the line
            self._process.kill()
        return_code = self._process.poll()
        hint = "The system ran out of memory, or somebody killed it." if return_code == -signal.SIGKILL else None
        error = self._failure or EngineDead(
            describe_exit(return_code), hint=hint or "Its last words are in the log (stderr)."
        )
        if not self._ready.done():
            self._ready.set_exception(error)
            return
        if self._stopping:
            return
        if not isinstance(error, EngineDead):
            error = EngineDead(error.message, hint=error.hint)
        self._listener.engine_died(error)

    async def _wait_exit(self) -> None:
        delay_s = 0.001
        while self._process.poll() is None:
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, 0.05)
