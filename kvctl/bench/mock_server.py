"""The scripted server: answers like an OpenAI-compatible server, at moments known beforehand, and logs when it wrote.

It exists so that a client's error can be measured: the log (`GET /mock/log`) holds, for every stream, when the
request arrived and when each event was handed to the kernel, on the machine's monotonic clock. It runs in a process
of its own, writes straight to the socket and keeps absolute deadlines, so that a late event does not delay the
next. Knows nothing of the client. Floor 3.
"""

import asyncio
import gc
import random
import signal
import socket
import weakref
from collections.abc import Callable

from kvctl.bench.event_loop import new_event_loop
from kvctl.bench.kernel_stamps import KernelStamps
from kvctl.bench.mock_connection import MockConnection
from kvctl.bench.mock_script import MockScript, StreamWriter
from kvctl.bench.mock_state import MockState
from kvctl.bench.precise_timer import PreciseTimer
from kvctl.bench.socket_poller import SocketPoller
from kvctl.bench.wire import ArrivalClock, SocketWire, TransportWire
from kvctl.errors import ConfigError


class MockServer:
    """The listening socket and all that hangs on it, on the running loop."""

    def __init__(self, script: MockScript, host: str, port: int) -> None:
        try:
            self._socket = socket.create_server((host, port), backlog=4096)
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error.strerror}"
            raise ConfigError(message, hint="Choose another --port.") from None
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._loop = asyncio.get_running_loop()
        self._timer = PreciseTimer(self._loop)
        self._stamps = KernelStamps()
        self._clock = ArrivalClock(uses_kernel=self._stamps.are_on)
        self._poller = SocketPoller(self._loop) if self._clock.uses_kernel else None
        self._accepting: set[asyncio.Task[None]] = set()
        self._wires: weakref.WeakSet[SocketWire] = weakref.WeakSet()
        self._state = MockState(script, self._timer, self._clock, StreamWriter(script), random.Random(script.seed))
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for wire in list(self._wires):
            wire.close()
        if self._poller is not None:
            self._poller.close()
        self._stamps.close()
        self._timer.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            connection = MockConnection(self._state)
            if self._poller is None:
                taking = self._loop.create_task(self._take(sock, connection))
                self._accepting.add(taking)
                taking.add_done_callback(self._accepting.discard)
                continue
            wire = SocketWire(self._poller, sock, connection)
            self._wires.add(wire)
            connection.attach(wire)

    async def _take(self, sock: socket.socket, connection: MockConnection) -> None:
        """No Linux: asyncio reads, and moments are those of the reads."""
        wire = TransportWire(connection)
        connection.attach(wire)
        await self._loop.connect_accepted_socket(lambda: wire, sock)


def run_mock(script: MockScript, host: str, port: int, on_ready: Callable[[int], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` is told the port.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        server = MockServer(script, host, port)
        on_ready(server.port)
        await stop.wait()
        server.close()

    gc.freeze()
    gc.set_threshold(50_000)  # a collection in mid-stream would make an event late
    loop = new_event_loop()
    try:
        loop.run_until_complete(serve())
    finally:
        loop.close()
