"""Calls back at a moment given to the microsecond: due times of an open loop, probes of the loop's own lag.

An event loop's own timers round to a millisecond, which is a tenth of the gap between two tokens. On Linux this
uses one `timerfd` with an absolute deadline for all callbacks; elsewhere the loop's timers, and `is_precise` says so.
Times are `time.perf_counter()` seconds, which on Linux are CLOCK_MONOTONIC. Knows nothing of requests. Floor 3.
"""

import asyncio
import ctypes
import heapq
import os
import sys
from collections.abc import Callable
from time import perf_counter

_CLOCK_MONOTONIC = 1
_TIMER_ABSOLUTE = 1
_SOON_S = 20e-6  # a deadline this near is met now: arming the timer would take longer


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class PreciseTimer:
    """A queue of deadlines on one event loop. Callbacks run on the loop, in order of their deadlines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0
        self._armed_s = float("inf")
        self._fd = -1
        self._spec = _TimerSpec()
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            self._settime = libc.timerfd_settime
            self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
            self._spec_pointer = ctypes.addressof(self._spec)
            self._fd = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        self.is_precise = self._fd >= 0
        if self.is_precise:
            loop.add_reader(self._fd, self._on_expired)

    def call_at(self, deadline_s: float, callback: Callable[[], None]) -> None:
        """Run `callback` at `deadline_s` (perf_counter seconds), or as soon after as the loop is free."""
        self._num_scheduled += 1
        heapq.heappush(self._queue, (deadline_s, self._num_scheduled, callback))
        if deadline_s < self._armed_s:
            self._arm(deadline_s)

    async def sleep_until(self, deadline_s: float) -> None:
        """Wait for a moment; returns at once when it has passed."""
        if deadline_s <= perf_counter():
            return
        reached: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not reached.done():
                reached.set_result(None)

        self.call_at(deadline_s, wake)
        await reached

    def close(self) -> None:
        """Forget all deadlines and give the descriptor back."""
        self._queue.clear()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self, deadline_s: float) -> None:
        self._armed_s = deadline_s
        if self.is_precise:
            seconds = int(deadline_s)
            self._spec.value.seconds = seconds
            self._spec.value.nanoseconds = max(1, int((deadline_s - seconds) * 1e9))
            self._settime(self._fd, _TIMER_ABSOLUTE, self._spec_pointer, None)
        else:
            self._loop.call_later(max(0.0, deadline_s - perf_counter()), self._run_due)

    def _disarm(self) -> None:
        """Stop the descriptor from being readable; arming it anew does so too, which saves reading it."""
        self._spec.value.seconds = self._spec.value.nanoseconds = 0
        self._settime(self._fd, _TIMER_ABSOLUTE, self._spec_pointer, None)

    def _on_expired(self) -> None:
        self._run_due()
        if not self._queue:
            self._disarm()

    def _run_due(self) -> None:
        self._armed_s = float("-inf")  # callbacks may add deadlines: armed once, below
        queue = self._queue
        horizon_s = perf_counter() + _SOON_S
        while queue and queue[0][0] <= horizon_s:
            heapq.heappop(queue)[2]()
        self._armed_s = float("inf")
        if queue:
            self._arm(queue[0][0])
