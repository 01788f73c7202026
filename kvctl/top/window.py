"""What happened between the first and the last reading of a window: increments that survive a server restart.

Pure. A counter that fell, or another process start time, is a restart: the value after it counts from zero, as
Prometheus' `rate` and `increase` take it. Two readings or more make a window; fewer make none. Floor 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from kvctl.metrics.histogram import Histogram
from kvctl.metrics.server_names import Counter, Gauge, Timing
from kvctl.top.reading import EngineReading

Key = TypeVar("Key")

_REGIME_READINGS = 3


@dataclass(slots=True)
class Window:
    """Increments over `duration_s`. A key that is absent was not on the page throughout."""

    duration_s: float
    num_readings: int
    num_restarts: int
    counters: dict[Counter, float] = field(default_factory=dict)
    timings: dict[Timing, Histogram] = field(default_factory=dict)
    miss_reasons: dict[str, float] = field(default_factory=dict)

    def rate(self, counter: Counter) -> float | None:
        """Return the counter's increase per second; None where it was not on the page."""
        increase = self.counters.get(counter)
        return None if increase is None else increase / self.duration_s


def is_restart(before: EngineReading, after: EngineReading) -> bool:
    """Whether the server started anew between the two readings."""
    starts = before.process_start_s, after.process_start_s
    if starts[0] is not None and starts[1] is not None and abs(starts[1] - starts[0]) > 1.0:
        return True
    return any(
        value < before.counters.get(counter, 0.0)
        for counter, value in after.counters.items()
        if counter is not Counter.CPU_SECONDS  # the operating system may round it down
    )


def readings_within(readings: Sequence[EngineReading], window_s: float) -> Sequence[EngineReading]:
    """Return the newest readings that span at most `window_s` (with a tenth's slack), at least the last two."""
    if len(readings) <= 2:
        return readings
    oldest_s = readings[-1].at_s - window_s * 1.1
    first = next(index for index, reading in enumerate(readings) if reading.at_s >= oldest_s)
    return readings[min(first, len(readings) - 2) :]


def current_regime(readings: Sequence[EngineReading]) -> Sequence[EngineReading]:
    """Return the newest readings that are of one kind: with a queue, or without; all of them where that flickers.

    A verdict about what happens now must not average over the time before it began. Three readings make a kind.
    A quiet beginning goes too, all but the last quiet reading, which the first increments are measured from.
    """
    queues = [reading.gauges.get(Gauge.WAITING, 0.0) > 0 for reading in readings]
    same = len(queues) - next((i + 1 for i in reversed(range(len(queues))) if queues[i] != queues[-1]), 0)
    if same >= _REGIME_READINGS:
        readings = readings[-same:]
    busy = next((i for i, r in enumerate(readings) if r.gauges.get(Gauge.RUNNING, 0.0) > 0), None)
    if busy is not None and busy >= 1 and len(readings) - busy >= _REGIME_READINGS:
        readings = readings[busy - 1 :]
    return readings


def measure(readings: Sequence[EngineReading]) -> Window | None:
    """Add up the increments from the first reading to the last; None with fewer than two readings."""
    if len(readings) < 2 or readings[-1].at_s <= readings[0].at_s:
        return None
    window = Window(readings[-1].at_s - readings[0].at_s, len(readings), 0)
    start: EngineReading | None = readings[0]
    for before, after in pairwise(readings):
        if is_restart(before, after):
            window.num_restarts += 1
            if before is not start:
                _add(window, start, before)
            start = None  # from here the totals count from the restart
        if after is readings[-1]:
            _add(window, start, after)
        elif start is None:
            _add(window, None, after)
            start = after
    return window


def trace(readings: Sequence[EngineReading], gauge: Gauge) -> tuple[float, ...]:
    """Return the gauge's values in time order, without the readings that lack it."""
    return tuple(reading.gauges[gauge] for reading in readings if gauge in reading.gauges)


def _add(window: Window, start: EngineReading | None, end: EngineReading) -> None:
    """Add what happened from `start` to `end`; with start None, everything since the restart before `end`."""
    _add_numbers(window.counters, None if start is None else start.counters, end.counters)
    _add_numbers(window.miss_reasons, None if start is None else start.miss_reasons, end.miss_reasons, appears=True)
    for timing, histogram in end.timings.items():
        grown = histogram if start is None else histogram.since(start.timings.get(timing))
        if grown is None:
            continue
        before = window.timings.get(timing)
        together = grown if before is None else before.plus(grown)
        if together is not None:
            window.timings[timing] = together


def _add_numbers(
    into: dict[Key, float], start: Mapping[Key, float] | None, end: Mapping[Key, float], *, appears: bool = False
) -> None:
    for key, value in end.items():
        before = 0.0 if start is None else start.get(key, 0.0 if appears else None)
        if before is not None:
            into[key] = into.get(key, 0.0) + max(0.0, value - before)
