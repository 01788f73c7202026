"""Series made for tests: pages written by hand and pages of the demo's engine, fed to a monitor second by second."""

from kvctl.metrics.exposition import parse_page
from kvctl.top.demo import DemoEngine, DemoLoad, DemoServer
from kvctl.top.diagnose import diagnose
from kvctl.top.monitor import EngineView, Monitor
from kvctl.top.reading import EngineReading, read_engines
from kvctl.top.scrape import Scrape
from kvctl.top.snapshot import Snapshot, take_snapshot
from kvctl.top.verdict import Verdict

URL = "http://server:8000/metrics"
START_S = 1_700_000_000.0
QUIET = DemoLoad(users=0)


def read(text: str, at_s: float = 0.0) -> EngineReading:
    """The only engine of a page."""
    (reading,) = read_engines(parse_page(text), at_s)
    return reading


def snapshot_of(*pages: str, step_s: float = 1.0) -> Snapshot:
    """One window over these pages, `step_s` apart."""
    return take_snapshot([read(page, index * step_s) for index, page in enumerate(pages)])


def verdict_of(*pages: str, step_s: float = 1.0) -> Verdict:
    """The verdict over these pages as one window."""
    return diagnose(snapshot_of(*pages, step_s=step_s))


def gauges(running: float, waiting: float, kv: float | None = None, **more: float) -> str:
    """vLLM's state lines."""
    lines = [f"vllm:num_requests_running {running}", f"vllm:num_requests_waiting {waiting}"]
    if kv is not None:
        lines.append(f"vllm:kv_cache_usage_perc {kv}")
    lines += [f"vllm:{name} {value}" for name, value in more.items()]
    return "\n".join(lines) + "\n"


def histogram(name: str, bounds: tuple[float, ...], counts: tuple[float, ...], total: float) -> str:
    """A histogram from per-bucket counts; the last one is above the last bound."""
    lines, seen = [f"# TYPE {name} histogram"], 0.0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        seen += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {seen}')
    return "\n".join([*lines, f"{name}_count {seen}", f"{name}_sum {total}"]) + "\n"


class Watched:
    """A demo engine and a monitor that looks at it once a second."""

    def __init__(self, server: DemoServer, load: DemoLoad = QUIET, seed: int = 0) -> None:
        self.engine = DemoEngine(server, load, seed)
        self.monitor = Monitor({URL: "server:8000"}, 1.0)
        self.now_s = START_S

    def run(self, seconds: int, load: DemoLoad | None = None) -> list[EngineView]:
        """Let it work; one view per second."""
        if load is not None:
            self.engine.set_load(load)
        views = []
        for _ in range(seconds):
            self.engine.advance(1.0)
            self.now_s += 1.0
            self.monitor.add(Scrape(URL, self.now_s, self.engine.page(), None))
            (view,) = self.monitor.view(self.now_s, 15.0).engines
            views.append(view)
        return views
