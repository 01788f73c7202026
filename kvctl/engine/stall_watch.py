"""Whether the engine process still gets on, judged from outside: by the steps it tells of and by the CPU time it takes.

The engine owes news from the first message sent to it until a step that leaves nothing unfinished. A step may be long:
on a CPU a process that computes gets on, one that is stopped or waits for ever does not. On a GPU a hung kernel keeps
the CPU spinning, so only steps count there. Knows no process and no clock: times come in. Floor 2, imports no torch.
"""

import os
from pathlib import Path
from typing import Final

_BUSY_SHARE: Final = 0.05  # of one core, over the time between two looks: less is not computing
_BUSY_FACTOR: Final = 20  # a single step gets that many times the limit, however busy the process is


class StallWatch:
    """Hears what goes to and comes from one engine.

    Args:
        timeout_s: without any progress for so long it is stalled; `math.inf`: never.
        counts_cpu_time: computing is progress.
    """

    def __init__(self, timeout_s: float, *, counts_cpu_time: bool) -> None:
        self.timeout_s = timeout_s
        self._counts_cpu_time = counts_cpu_time
        self._owing_since_s: float | None = None  # None: it owes nothing
        self._quiet_since_s = 0.0  # no progress since then
        self._last_look: tuple[float, float | None] | None = None

    def sent(self, now_s: float) -> None:
        """Note a message that the engine must answer."""
        if self._owing_since_s is None:
            self._owing_since_s = self._quiet_since_s = now_s

    def heard(self, now_s: float, *, owes_more: bool) -> None:
        """Note news from the engine."""
        self._owing_since_s = now_s if owes_more else None
        self._quiet_since_s = now_s

    def look(self, now_s: float, cpu_s: float | None) -> None:
        """Note the CPU seconds that the process has taken so far; None: this system does not tell."""
        before, self._last_look = self._last_look, (now_s, cpu_s)
        if self._owing_since_s is None or before is None or not self._counts_cpu_time:
            return
        if now_s - self._owing_since_s > _BUSY_FACTOR * self.timeout_s:
            return
        then_s, cpu_then_s = before
        if cpu_s is None or cpu_then_s is None or cpu_s - cpu_then_s >= _BUSY_SHARE * (now_s - then_s):
            self._quiet_since_s = now_s

    def stalled_s(self, now_s: float) -> float | None:
        """Seconds since the last news of an engine that owes some and does not get on; None: it does."""
        if self._owing_since_s is None or now_s - self._quiet_since_s < self.timeout_s:
            return None
        return now_s - self._owing_since_s


def cpu_seconds(pid: int) -> float | None:
    """CPU time that a process has taken with all its threads; None: it has ended, or this is not Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name may hold spaces; from the state on they are numbers
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
