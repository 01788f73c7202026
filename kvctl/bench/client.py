"""Sends requests to one server over a pool of connections, opening more as they are needed.

Knows one server's address, path and headers; knows nothing of what is sent or of when. A request that meets a kept
connection which the server has just closed is sent once more on a new one. Floor 3.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

from kvctl.bench.http_connection import Exchange, HttpConnection
from kvctl.bench.kernel_stamps import KernelStamps
from kvctl.bench.precise_timer import PreciseTimer
from kvctl.bench.socket_poller import SocketPoller
from kvctl.bench.stream_decoder import StreamDecoder
from kvctl.bench.tls import tls_context
from kvctl.bench.wire import ArrivalClock, connect
from kvctl.errors import ConfigError, ServerUnreachable


@dataclass(frozen=True)
class ClientConfig:
    """Where requests go and how connections are kept."""

    url: str  # http://host:port, with any path before /v1
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    keep_alive: bool = True
    verify_tls: bool = True


class LoadClient:
    """A pool of connections to one server."""

    def __init__(
        self, config: ClientConfig, loop: asyncio.AbstractEventLoop, timer: PreciseTimer | None = None
    ) -> None:
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{config.url!r} is not a server's address", hint="Write it like http://127.0.0.1:8000.")
        self._config = config
        self._loop = loop
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls_context(config.verify_tls) if parts.scheme == "https" else None
        self._addresses: list[str] = []  # the one that answered last comes first
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._stamps = KernelStamps()
        self.clock = ArrivalClock(uses_kernel=self._stamps.are_on)
        self._poller = SocketPoller(loop, timer) if self.clock.uses_kernel and self._tls is None else None
        self.num_connections = 0
        head = [
            f"POST {parts.path.rstrip('/')}{config.path} HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
            "content-type: application/json",
            "accept: text/event-stream",
            "user-agent: kvctl-bench",
            *(f"{name}: {value}" for name, value in config.headers.items()),
        ]
        if not config.keep_alive:
            head.append("connection: close")
        self._head = "\r\n".join(head).encode("latin-1")

    async def resolve(self) -> None:
        """Look the host up once, so that no lookup is timed.

        Raises:
            ServerUnreachable: the name is not known.
        """
        try:
            found = await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ServerUnreachable(
                f"cannot look up {self._host!r}: {error.strerror or error}", hint="Check the address of the server."
            ) from None
        self._addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def perform(
        self,
        request_id: str,
        body: bytes,
        due_s: float,
        on_end: Callable[[Exchange], None],
        *,
        place_wait_s: float = 0.0,
        keep_text: bool = False,
        keep_times: bool = False,
    ) -> Exchange:
        """Send one request and wait until its answer is complete or has failed; never raises for a failed request.

        `on_end` is called once with the exchange, also when this is cancelled.
        """
        request = b"%b\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            self._head,
            request_id.encode(),
            len(body),
            body,
        )
        exchange = None
        try:
            while exchange is None or exchange.error_kind == "stale":
                decoder = StreamDecoder(keep_text=keep_text, keep_times=keep_times)
                exchange = Exchange(request_id, due_s, decoder, self._loop.create_future())
                exchange.place_wait_s = place_wait_s
                connection = self._take_idle() or await self._connect(exchange)
                if connection is not None:
                    await self._exchange(connection, exchange, request)
        except asyncio.CancelledError:
            if exchange is not None:  # it may have been cancelled while connecting
                exchange.end(perf_counter(), "cancelled", "no end before the drain was over")
            raise
        finally:
            if exchange is not None:
                on_end(exchange)
        return exchange

    async def _exchange(self, connection: HttpConnection, exchange: Exchange, request: bytes) -> None:
        self._busy.add(connection)
        timeout = self._loop.call_later(
            self._config.timeout_s, connection.abort, "timeout", f"no end after {self._config.timeout_s:g} s"
        )
        try:
            connection.send(exchange, request)
            await exchange.finished
        except asyncio.CancelledError:
            connection.abort("cancelled", "no end before the drain was over")
            raise
        finally:
            timeout.cancel()
            self._busy.discard(connection)
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        """Close every connection; requests under way end as cancelled."""
        for connection in self._idle:
            connection.close()
        for connection in list(self._busy):
            connection.abort("cancelled", "the run was over")
        self._idle.clear()
        if self._poller is not None:
            self._poller.close()
        self._stamps.close()

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, exchange: Exchange) -> HttpConnection | None:
        if not self._addresses:
            await self.resolve()
        self.num_connections += 1
        begin_s = perf_counter()
        for address in tuple(self._addresses):
            is_last = address == self._addresses[-1]
            connection = await self._connect_to(address, exchange, may_fail=not is_last)
            if connection is not None:
                if address != self._addresses[0]:  # e.g. localhost: ::1 is tried first, the server has 127.0.0.1
                    self._addresses.remove(address)
                    self._addresses.insert(0, address)
                exchange.connect_s = perf_counter() - begin_s
                return connection
        return None

    async def _connect_to(self, address: str, exchange: Exchange, *, may_fail: bool) -> HttpConnection | None:
        connection = HttpConnection(self.clock)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                wire = await connect(
                    self._poller,
                    (address, self._port),
                    connection,
                    tls=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
            connection.attach(wire)
        except OSError as error:  # TimeoutError and ssl.SSLError are such too
            if not may_fail:
                exchange.end(perf_counter(), *self._connect_failure(error))
        else:
            return connection
        return None

    def _connect_failure(self, error: OSError) -> tuple[str, str]:
        if isinstance(error, ssl.SSLError):
            return "tls", str(error.reason or error)
        if isinstance(error, TimeoutError):
            return "connect", f"no connection after {self._config.connect_timeout_s:g} s"
        return "connect", error.strerror or str(error)
