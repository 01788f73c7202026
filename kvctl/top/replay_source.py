"""A recorded session as a source of scrapes, at its own pace or faster. Floor 3."""

import threading
from collections.abc import Iterator
from pathlib import Path

from kvctl.errors import ConfigError
from kvctl.top.record import read_record
from kvctl.top.scrape import Scrape
from kvctl.top.sources import Deliver

_MAX_GAP_S = 10.0  # a pause in a recording is replayed as at most this


class ReplaySource:
    """Plays a recorded session, at its own pace or faster."""

    def __init__(self, path: Path, speed: float) -> None:
        self.labels: dict[str, str] = {}
        self.title = f"replay x{speed:g}"
        self._path = path
        self._speed = speed
        self._now_s = 0.0
        self._stopped = threading.Event()
        self._going = threading.Event()
        self._going.set()

    def start(self, deliver: Deliver) -> None:
        """Read the first scrape here, so that a bad file fails at once; play in a thread."""
        scrapes = read_record(self._path)
        first = next(scrapes, None)
        if first is None:
            raise ConfigError(f"{self._path} holds no scrape", hint="Record for longer.")
        self._now_s = first.at_s
        deliver(first)
        threading.Thread(target=self._play, args=(scrapes, deliver), daemon=True, name="replay").start()

    def stop(self) -> None:
        """End the replay."""
        self._stopped.set()
        self._going.set()

    def set_interval(self, interval_s: float) -> None:
        """The recording has its own interval."""

    def set_paused(self, paused: bool) -> None:
        """Hold the tape, or let it run."""
        if paused:
            self._going.clear()
        else:
            self._going.set()

    def now_s(self) -> float:
        """Return the recording's time."""
        return self._now_s

    def _play(self, scrapes: Iterator[Scrape], deliver: Deliver) -> None:
        for scrape in scrapes:
            self._stopped.wait(min(_MAX_GAP_S, max(0.0, scrape.at_s - self._now_s)) / self._speed)
            self._going.wait()
            if self._stopped.is_set():
                return
            self._now_s = max(self._now_s, scrape.at_s)
            deliver(scrape)
