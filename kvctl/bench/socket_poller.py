"""Waits for many sockets at once: one epoll of our own, which the event loop watches as a single file descriptor.

Two reasons to have one. A batch of ready sockets costs one wake-up of the loop and then plain calls, and errors (a
connection that was reset) reach the handler: uvloop's add_reader drops those. Linux only. Floor 3.

Given a timer, it collects: when thousands of reads a second come, it looks once in a window of up to a millisecond, an
eighth of the time between two reads of one socket at most, instead of waking up for each. A wake-up costs more than the
reading. Only for readers who know when bytes arrived without having been there (`wire`).
"""

import asyncio
import contextlib
import select
from collections.abc import Callable
from time import perf_counter

from kvctl.bench.precise_timer import PreciseTimer

READ = 0x001 | 0x008 | 0x010 | 0x2000  # EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP, sys/epoll.h
WRITE = 0x004  # EPOLLOUT
_WANTS_READ = 0x001
_MAX_BATCH = 256  # then the loop gets its turn: timers must not wait for a thousand sockets
_MAX_WINDOW_S = 0.001
_WINDOW_SHARE = 1 / 8  # of the time between two reads of one socket: two of them are never read as one
_SAMPLE = 256  # ready sockets over which the rate is judged
_WORTH_IT = 2.0  # reads that a window must hold on average


class SocketPoller:
    """Calls a socket's handler with what it is ready for (a mask of READ and WRITE bits)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timer: PreciseTimer | None = None) -> None:
        self._loop = loop
        self._timer = timer if timer is not None and timer.is_precise else None
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._num_ready = 0  # since the sample began
        self._sample_s = perf_counter()
        self._window_s = 0.0
        self.is_collecting = False
        loop.add_reader(self._epoll.fileno(), self._on_ready)

    def add(self, fd: int, handler: Callable[[int], None]) -> None:
        """Watch for bytes to read, errors and the end."""
        self._handlers[fd] = handler
        self._epoll.register(fd, _WANTS_READ)

    def watch_writes(self, fd: int, wanted: bool) -> None:
        """Also (or no longer) tell when there is room to write."""
        self._epoll.modify(fd, _WANTS_READ | WRITE if wanted else _WANTS_READ)

    def remove(self, fd: int) -> None:
        """Forget a socket; to be called before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop watching everything."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._handlers.clear()
            self._epoll.close()

    def _on_ready(self) -> None:
        self._handle_ready()
        if self._timer is not None and self._num_ready >= _SAMPLE and self._judge(perf_counter()):
            self.is_collecting = True
            self._loop.remove_reader(self._epoll.fileno())
            self._timer.call_at(perf_counter() + self._window_s, self._collect)

    def _collect(self) -> None:
        if self._epoll.closed or self._timer is None:
            return
        now_s = perf_counter()
        self._handle_ready()
        is_due = self._num_ready >= _SAMPLE or now_s - self._sample_s > _SAMPLE * self._window_s
        if is_due and not self._judge(now_s):
            self.is_collecting = False
            if not self._epoll.closed:
                self._loop.add_reader(self._epoll.fileno(), self._on_ready)
            return
        self._timer.call_at(now_s + self._window_s, self._collect)

    def _judge(self, now_s: float) -> bool:
        """Whether collecting is worth it at the rate of this sample, and in which window; begins the next sample."""
        per_s = self._num_ready / max(now_s - self._sample_s, 1e-9)
        self._num_ready, self._sample_s = 0, now_s
        if per_s <= 0 or self._epoll.closed:
            return False
        self._window_s = min(_MAX_WINDOW_S, _WINDOW_SHARE * len(self._handlers) / per_s)
        return self._window_s * per_s >= _WORTH_IT

    def _handle_ready(self) -> None:
        handlers = self._handlers
        ready = self._epoll.poll(0, _MAX_BATCH)
        self._num_ready += len(ready)
        for fd, mask in ready:
            handler = handlers.get(fd)  # an earlier handler of this batch may have closed it
            if handler is not None:
                handler(mask)
