"""Moves bytes over one connection and says when they arrived: by the kernel's clock where it has one.

On Linux a plain TCP socket is read with `recvmsg` and SO_TIMESTAMPNS: the kernel notes the moment a segment comes in,
so what is measured does not depend on how busy this process is, and how late each read was handled is known exactly.
With TLS, and elsewhere, asyncio's transport reads, and the moment is that of the read. Knows nothing of HTTP. Floor 3.

Source: Linux, Documentation/networking/timestamping.rst, section 1.1 (SO_TIMESTAMPNS; for TCP, the last segment read).
"""

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import sys
from array import array
from collections.abc import Sequence
from time import CLOCK_REALTIME, clock_gettime_ns, perf_counter, perf_counter_ns
from typing import Protocol, cast

from kvctl.bench.kernel_stamps import SO_TIMESTAMPNS
from kvctl.bench.socket_poller import READ, WRITE, SocketPoller
from kvctl.metrics.log_histogram import LogHistogram

_TIMESPEC = struct.Struct("@qq")
_iter_timespecs = _TIMESPEC.iter_unpack
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size) if sys.platform == "linux" else 0
_READ_BYTES = 64 * 1024
_MAX_KEPT = 64
_OFFSET_AGE_S = 0.05
_MAX_PLAUSIBLE_LAG_S = 10.0  # beyond it the wall clock was set in between: the moment of the read is taken


Read = tuple[bytes, bytes | None, float]  # what came, the kernel's stamp, when it was read (perf_counter seconds)


class ArrivalClock:
    """Turns the kernel's wall-clock stamps into perf_counter seconds, and keeps how late reads were handled."""

    def __init__(self, *, uses_kernel: bool = True) -> None:
        self.uses_kernel = uses_kernel  # False from the first read without a stamp
        self.lags = LogHistogram()
        self._recent_lags_s = array("d")
        self._offset_s = 0  # wall clock minus perf_counter: whole seconds ...
        self._offset_rest_s = 0.0  # ... and the rest, apart for the sake of precision
        self._offset_until_s = 0.0

    def arrivals_s(self, reads: Sequence[Read]) -> list[float]:
        """The arrivals of reads that were made in order, each about the same time before its read."""
        last_s = reads[-1][2]
        if last_s > self._offset_until_s:
            self._measure_offset()
            self._offset_until_s = last_s + _OFFSET_AGE_S
            self.flush()
        stamps = [stamp for _, stamp, _ in reads if stamp is not None]
        if len(stamps) == len(reads):
            offset_s, rest_s = self._offset_s, self._offset_rest_s
            arrivals_s = [
                seconds - offset_s - rest_s + nanoseconds * 1e-9
                for seconds, nanoseconds in _iter_timespecs(b"".join(stamps))
            ]
            first_lag_s, lag_s = reads[0][2] - arrivals_s[0], last_s - arrivals_s[-1]
            if 0.0 <= lag_s < _MAX_PLAUSIBLE_LAG_S and 0.0 <= first_lag_s < _MAX_PLAUSIBLE_LAG_S:
                self._recent_lags_s.append(lag_s)
                if len(reads) > 1:
                    self._recent_lags_s.append(first_lag_s)
                return arrivals_s
        else:
            self.uses_kernel = False
        return [now_s for _, _, now_s in reads]

    def flush(self) -> None:
        """Move the lags kept last into the histogram."""
        self.lags.add(self._recent_lags_s)
        del self._recent_lags_s[:]

    def _measure_offset(self) -> None:
        best_ns, offset_ns = 1 << 62, 0
        for _ in range(3):
            before_ns = perf_counter_ns()
            wall_ns = clock_gettime_ns(CLOCK_REALTIME)
            after_ns = perf_counter_ns()
            if after_ns - before_ns < best_ns:
                best_ns = after_ns - before_ns
                offset_ns = wall_ns - (before_ns + after_ns) // 2
        self._offset_s, rest_ns = divmod(offset_ns, 1_000_000_000)
        self._offset_rest_s = rest_ns * 1e-9


class Receiver(Protocol):
    """Who reads from a wire."""

    def receive(self, reads: list[Read]) -> None:
        """Take what was read, in order; `ArrivalClock` makes moments of the kernel's stamps."""

    def lost(self, error: OSError | None) -> None:
        """The connection has ended; called once."""


class Wire(Protocol):
    """One open connection."""

    def send(self, data: bytes) -> None:
        """Hand bytes to the kernel now as far as it takes them, the rest when it does.

        Raises:
            OSError: the connection is gone.
        """

    def keep_reads(self, ending: bytes | None) -> None:
        """From now on keep reads that end with this, some at a time, until one ends otherwise. None: keep none."""

    def close(self) -> None:
        """Close; `lost` is not called any more. Reads that were kept are given out before."""

    def abort(self) -> None:
        """Close at once and rudely (the peer sees a reset)."""


class SocketWire:
    """A plain TCP connection, read with the kernel's time stamps."""

    __slots__ = (
        "__weakref__",
        "_fd",
        "_kept_ending",
        "_poller",
        "_reads",
        "_receiver",
        "_recvmsg",
        "_socket",
        "_unsent",
    )

    def __init__(self, poller: SocketPoller, sock: socket.socket, receiver: Receiver) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # a sandbox may know no stamps: reads then come without one
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._poller = poller
        self._socket = sock
        self._recvmsg = sock.recvmsg
        self._fd = sock.fileno()
        self._receiver = receiver
        self._reads: list[Read] = []
        self._kept_ending: bytes | None = None
        self._unsent = bytearray()
        poller.add(self._fd, self._on_ready)

    def send(self, data: bytes) -> None:
        """Hand bytes to the kernel now as far as it takes them, the rest when it does."""
        if self._fd < 0:
            raise BrokenPipeError
        sent = 0
        if not self._unsent:
            try:
                sent = os.write(self._fd, data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
            self._poller.watch_writes(self._fd, True)
        self._unsent += memoryview(data)[sent:]

    def keep_reads(self, ending: bytes | None) -> None:
        """Keep reads that end with this, some at a time, until one ends otherwise."""
        self._kept_ending = ending

    def close(self) -> None:
        """Close; `lost` is not called any more. Reads that were kept are given out before."""
        if self._fd >= 0:
            self._poller.remove(self._fd)
            self._fd = -1
            self._socket.close()
            self._give_out()

    def abort(self) -> None:
        """Close at once and rudely: unsent data is dropped, the peer sees a reset."""
        if self._fd >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close()

    def _on_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._on_writable()
            if not mask & READ or self._fd < 0:
                return
        try:
            data, ancillary, _, _ = self._recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        if not data:
            self._lose(None)
            return
        reads, kept_ending = self._reads, self._kept_ending
        reads.append((data, ancillary[0][2] if ancillary else None, perf_counter()))
        if kept_ending is None or len(reads) == _MAX_KEPT or not data.endswith(kept_ending):
            self._give_out()

    def _give_out(self) -> None:
        reads, self._reads = self._reads, []
        if reads:
            self._receiver.receive(reads)

    def _on_writable(self) -> None:
        try:
            sent = os.write(self._fd, self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._poller.watch_writes(self._fd, False)

    def _lose(self, error: OSError | None) -> None:
        self.close()
        self._receiver.lost(error)


class TransportWire(asyncio.Protocol):
    """A connection read by asyncio: TLS, or no Linux. Moments are those of the reads."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver: Receiver | None = receiver
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes have been read."""
        now_s = perf_counter()
        if self._receiver is not None:
            self._receiver.receive([(data, None, now_s)])

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection has ended."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.lost(exc if isinstance(exc, OSError) else None)

    def send(self, data: bytes) -> None:
        """Hand bytes to the transport, which writes them at once where it can."""
        self._transport.write(data)

    def keep_reads(self, ending: bytes | None) -> None:
        """Nothing is kept: the moments are those of the reads."""

    def close(self) -> None:
        """Close; `lost` is not called any more."""
        self._receiver = None
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._receiver = None
        self._transport.abort()


async def connect(
    poller: SocketPoller | None,
    address: tuple[str, int],
    receiver: Receiver,
    *,
    tls: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
) -> Wire:
    """Open a connection to an IP address: read by the kernel's clock when there is a poller and no TLS.

    Raises:
        OSError: refused, unreachable or no TLS (ssl.SSLError is an OSError).
    """
    loop = asyncio.get_running_loop()
    if tls is not None or poller is None:
        _, wire = await loop.create_connection(
            lambda: TransportWire(receiver), *address, ssl=tls, server_hostname=server_hostname
        )
        return wire
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, address)
        return SocketWire(poller, sock, receiver)
    except BaseException:
        sock.close()
        raise
