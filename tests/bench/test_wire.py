"""When bytes arrived, by the kernel: whatever the reader was doing meanwhile."""

import asyncio
import socket
import struct
import subprocess
import sys
import time

import pytest

from kvctl.bench.event_loop import new_event_loop
from kvctl.bench.kernel_stamps import KernelStamps
from kvctl.bench.socket_poller import SocketPoller
from kvctl.bench.wire import ArrivalClock, SocketWire


class Reader:
    def __init__(self, clock=None):
        self.clock = clock or ArrivalClock()
        self.reads = []
        self.lost_with = "open"

    def receive(self, reads):
        self.reads += zip((data for data, _, _ in reads), self.clock.arrivals_s(reads), strict=True)

    def lost(self, error):
        self.lost_with = error


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    yield ours, theirs
    theirs.close()


def run(coroutine):
    loop = new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def test_the_moment_is_that_of_the_arrival_though_the_reader_was_busy(pair):
    ours, theirs = pair

    async def main():
        stamps = KernelStamps()
        clock = ArrivalClock(uses_kernel=stamps.are_on)
        reader = Reader(clock)
        wire = SocketWire(SocketPoller(asyncio.get_running_loop()), ours, reader)
        theirs.sendall(b"hello")
        sent_s = time.perf_counter()
        time.sleep(0.05)  # the loop is blocked, as a busy client's is
        while not reader.reads:
            await asyncio.sleep(0)
        clock.flush()
        wire.close()
        stamps.close()
        assert clock.uses_kernel
        return reader.reads, sent_s, clock.lags

    reads, sent_s, lags = run(main())
    assert [data for data, _ in reads] == [b"hello"]
    assert abs(reads[0][1] - sent_s) < 0.04  # the read itself came 50 ms later
    assert lags.percentile_s(50) > 0.045


FIRST_READS = """
from kvctl.bench.kernel_stamps import SO_TIMESTAMPNS, KernelStamps
import socket

stamps = KernelStamps()
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    peer, _ = server.accept()
    client.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    bare = 0
    for _ in range(200):
        peer.send(b"x")
        bare += not client.recvmsg(1, 64)[1]
    peer.close()
stamps.close()
print(stamps.are_on, bare)
"""


def test_already_the_first_read_of_a_process_has_a_stamp():
    done = subprocess.run([sys.executable, "-c", FIRST_READS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]


def test_a_wall_clock_that_was_set_falls_back_to_the_read():
    clock = ArrivalClock()
    now_s = time.perf_counter()
    for wrong in (time.time() + 3600, time.time() - 3600):
        stamp = struct.pack("@qq", int(wrong), 0)
        assert clock.arrivals_s([(b"", stamp, now_s)]) == [now_s]


def test_what_the_kernel_does_not_take_at_once_is_sent_later(pair):
    ours, theirs = pair
    data = bytes(range(256)) * 40_000

    async def main():
        loop = asyncio.get_running_loop()
        wire = SocketWire(SocketPoller(loop), ours, Reader())
        wire.send(data)
        wire.send(b"end")
        theirs.setblocking(False)
        received = bytearray()
        while len(received) < len(data) + 3:
            received += await loop.sock_recv(theirs, 1 << 20)
        wire.close()
        return bytes(received)

    assert run(main()) == data + b"end"


def test_a_reset_is_told_as_an_error(pair):
    ours, theirs = pair

    async def main():
        reader = Reader()
        SocketWire(SocketPoller(asyncio.get_running_loop()), ours, reader)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        while reader.lost_with == "open":
            await asyncio.sleep(0)
        return reader.lost_with

    assert isinstance(run(main()), ConnectionResetError)


def test_the_end_of_a_connection_is_told_once(pair):
    ours, theirs = pair

    async def main():
        reader = Reader()
        wire = SocketWire(SocketPoller(asyncio.get_running_loop()), ours, reader)
        theirs.close()
        while reader.lost_with == "open":
            await asyncio.sleep(0)
        with pytest.raises(OSError):
            wire.send(b"x")
        return reader.lost_with

    assert run(main()) is None
