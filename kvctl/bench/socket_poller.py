"""Waits for many sockets at once: one epoll of our own, which the event loop watches as a single file descriptor.

Two reasons to have one. A batch of ready sockets costs one wake-up of the loop and then plain calls, and errors (a
connection that was reset) reach the handler: uvloop's add_reader drops those. Linux only. Floor 3.
"""

import asyncio
import contextlib
import select
from collections.abc import Callable

READ = 0x001 | 0x008 | 0x010 | 0x2000  # EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP, sys/epoll.h
WRITE = 0x004  # EPOLLOUT
_WANTS_READ = 0x001
_MAX_BATCH = 256  # then the loop gets its turn: timers must not wait for a thousand sockets


class SocketPoller:
    """Calls a socket's handler with what it is ready for (a mask of READ and WRITE bits)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
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
        handlers = self._handlers
        for fd, mask in self._epoll.poll(0, _MAX_BATCH):
            handler = handlers.get(fd)  # an earlier handler of this batch may have closed it
            if handler is not None:
                handler(mask)
