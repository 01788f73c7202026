"""Where scrapes come from: live servers, a recorded session, or the demo. All behind one small protocol.

A source is started with a function that takes each scrape as it comes (from another thread), and stopped. Live
endpoints are asked each in a thread of its own, so that one that hangs delays no other. Floor 3.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kvctl.errors import ConfigError
from kvctl.top.demo import DemoEngine, DemoLoad, DemoServer
from kvctl.top.endpoint import Endpoint
from kvctl.top.record import read_record
from kvctl.top.scrape import Scrape, ScrapeOptions, Scraper, SteadyClock

Deliver = Callable[[Scrape], None]
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 600.0
_RECONNECT_S = 5.0  # a dead endpoint with a long interval is asked this often
_MAX_GAP_S = 10.0  # a pause in a recording is replayed as at most this


class Source(Protocol):
    """Delivers scrapes until stopped."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Address -> what to call it, as far as known before the first scrape."""

    @property
    def title(self) -> str:
        """'live', 'replay x4' or 'demo'."""

    def start(self, deliver: Deliver) -> None:
        """Begin; `deliver` is called from other threads."""

    def stop(self) -> None:
        """End; after this nothing is delivered."""

    def set_interval(self, interval_s: float) -> None:
        """Change how often to ask."""

    def set_paused(self, paused: bool) -> None:
        """Hold on or go on."""

    def now_s(self) -> float:
        """The moment that ages are measured from."""


class LiveSource:
    """Asks every endpoint at the interval."""

    title = "live"

    def __init__(self, endpoints: Sequence[Endpoint], options: ScrapeOptions, interval_s: float) -> None:
        self.labels = {endpoint.url: endpoint.label for endpoint in endpoints}
        self._endpoints = endpoints
        self._options = options
        self._interval_s = interval_s
        self._clock = SteadyClock()
        self._stopped = threading.Event()
        self._going = threading.Event()
        self._going.set()

    def start(self, deliver: Deliver) -> None:
        """Start one thread per endpoint."""
        for endpoint in self._endpoints:
            thread = threading.Thread(target=self._ask, args=(endpoint, deliver), daemon=True, name=endpoint.label)
            thread.start()

    def stop(self) -> None:
        """Tell the threads to end; they are daemons and hold nothing that needs closing in order."""
        self._stopped.set()
        self._going.set()

    def set_interval(self, interval_s: float) -> None:
        """Change how often to ask, from the next round on."""
        self._interval_s = interval_s

    def set_paused(self, paused: bool) -> None:
        """Ask no more, or again."""
        if paused:
            self._going.clear()
        else:
            self._going.set()

    def now_s(self) -> float:
        """Return the steady wall clock."""
        return self._clock()

    def _ask(self, endpoint: Endpoint, deliver: Deliver) -> None:
        scraper = Scraper(endpoint, replace(self._options, timeout_s=max(self._options.timeout_s, 0.5)), self._clock)
        due = time.monotonic()
        try:
            while not self._stopped.is_set():
                self._going.wait()
                if self._stopped.is_set():
                    return
                scrape = scraper.scrape()
                if self._stopped.is_set():
                    return
                deliver(scrape)
                wait_s = self._interval_s if scrape.text is not None else min(self._interval_s, _RECONNECT_S)
                due = max(due + wait_s, time.monotonic())
                self._stopped.wait(due - time.monotonic())
        finally:
            scraper.close()


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


@dataclass(frozen=True)
class _Act:
    """A piece of the demo's play."""

    seconds: float
    load: DemoLoad


_PLAYS: Mapping[str, tuple[DemoServer, tuple[_Act, ...]]] = {
    "demo://kv": (
        DemoServer(kv_tokens=24_576, max_num_seqs=64),
        (
            _Act(25, DemoLoad(users=12)),
            _Act(40, DemoLoad(users=70, prompt_tokens=700, output_tokens=500)),
            _Act(15, DemoLoad(users=0)),
        ),
    ),
    "demo://seats": (
        DemoServer(max_num_seqs=16, exports_limits=False),
        (_Act(20, DemoLoad(users=10)), _Act(45, DemoLoad(users=40)), _Act(15, DemoLoad(users=10))),
    ),
    "demo://docs": (
        DemoServer(kv_tokens=16_384),
        (
            _Act(25, DemoLoad(users=2, prompt_tokens=3000, documents=4, output_tokens=120)),
            _Act(45, DemoLoad(users=2, prompt_tokens=3000, documents=7, output_tokens=120)),
        ),
    ),
}


class DemoSource:
    """Three servers that exist only as numbers, each driven through calm and trouble. Time is real."""

    title = "demo"

    def __init__(self, interval_s: float, *, warm_up_s: float = 30.0) -> None:
        self.labels = {url: url.removeprefix("demo://") for url in _PLAYS}
        self._interval_s = interval_s
        self._clock = SteadyClock()
        self._stopped = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._played_s = 0.0
        self._warm_up_s = warm_up_s
        self._engines = {url: DemoEngine(server, acts[0].load) for url, (server, acts) in _PLAYS.items()}

    def start(self, deliver: Deliver) -> None:
        """Play the first half minute at once, so that graphs are not empty; then in real time, in a thread."""
        self.play_warm_up(deliver)
        threading.Thread(target=self._run, args=(deliver,), daemon=True, name="demo").start()

    def play_warm_up(self, deliver: Deliver) -> None:
        """Play the first half minute at once; its last moment is now."""
        start_s = self._clock() - self._warm_up_s
        for second in range(int(self._warm_up_s) + 1):
            self._play(float(second) - self._played_s, start_s + second, deliver)

    def stop(self) -> None:
        """End the play."""
        self._stopped.set()
        self._going.set()

    def set_interval(self, interval_s: float) -> None:
        """Change how often a page is looked at."""
        self._interval_s = interval_s

    def set_paused(self, paused: bool) -> None:
        """Freeze the servers, or let them go on."""
        if paused:
            self._going.clear()
        else:
            self._going.set()

    def now_s(self) -> float:
        """Return the steady wall clock."""
        return self._clock()

    def _run(self, deliver: Deliver) -> None:
        while not self._stopped.wait(self._interval_s):
            self._going.wait()
            if self._stopped.is_set():
                return
            self._play(self._interval_s, self._clock(), deliver)

    def _play(self, seconds: float, at_s: float, deliver: Deliver) -> None:
        self._played_s += seconds
        for index, (url, engine) in enumerate(self._engines.items()):
            engine.set_load(_load_at(_PLAYS[url][1], self._played_s + 12 * index))
            if seconds > 0:
                engine.advance(seconds)
            deliver(Scrape(url, at_s, engine.page(model=f"demo-{url.removeprefix('demo://')}"), None))


def _load_at(acts: Sequence[_Act], played_s: float) -> DemoLoad:
    left_s = played_s % sum(act.seconds for act in acts)
    for act in acts:
        if left_s < act.seconds:
            return act.load
        left_s -= act.seconds
    return acts[-1].load
