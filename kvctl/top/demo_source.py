"""The demo's servers as a source of scrapes: three engines of numbers, driven through calm and trouble. Floor 3."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvctl.top.demo import DemoEngine, DemoLoad, DemoServer
from kvctl.top.scrape import Scrape, SteadyClock
from kvctl.top.sources import Deliver


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
