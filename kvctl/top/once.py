"""Two scrapes of each endpoint, an interval apart: what `kvctl top --once` measures before it prints. Floor 3.

The time between the two is not idle: everything that reading and printing needs is imported then, so that the
command starts to measure at once and answers right after the window.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvctl.top.endpoint import Endpoint
from kvctl.top.scrape import Scrape, ScrapeOptions, Scraper, SteadyClock

if TYPE_CHECKING:
    from kvctl.top.monitor import FleetView

EXIT_HEALTHY, EXIT_UNREACHABLE, EXIT_UNKNOWN, EXIT_LIMIT = 0, 1, 3, 10


def watch_once(
    endpoints: Sequence[Endpoint],
    options: ScrapeOptions,
    interval_s: float,
    *,
    summed: bool = False,
    record: Callable[[Scrape], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> "FleetView":
    """Scrape every endpoint twice, all at the same time, and return what was seen.

    `meanwhile` is called once, between the first scrapes and the second.
    """
    clock = SteadyClock()
    inbox: queue.SimpleQueue[Scrape] = queue.SimpleQueue()

    def ask(endpoint: Endpoint) -> None:
        scraper = Scraper(endpoint, options, clock)
        began = time.monotonic()
        try:
            for number in range(2):
                if number:
                    time.sleep(max(0.0, interval_s - (time.monotonic() - began)))
                scrape = scraper.scrape()
                inbox.put(scrape)
                if scrape.text is None:
                    return
        finally:
            scraper.close()

    threads = [threading.Thread(target=ask, args=(endpoint,), daemon=True) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    from kvctl.top.monitor import Monitor

    monitor = Monitor({endpoint.url: endpoint.label for endpoint in endpoints}, interval_s)

    def take() -> None:
        while not inbox.empty():
            scrape = inbox.get()
            monitor.add(scrape)
            if record is not None:
                record(scrape)

    if meanwhile is not None:
        meanwhile()
    take()
    for thread in threads:
        thread.join()
    take()
    return monitor.view(clock(), interval_s, summed=summed)


def exit_code(fleet: "FleetView") -> int:
    """0 healthy or idle; 10 a limit binds anywhere; 1 an endpoint did not answer; 3 cannot tell."""
    views = fleet.engines
    if any(view.verdict.limit.binds and not view.is_stale for view in views):
        return EXIT_LIMIT
    if any(view.is_stale and not view.is_foreign for view in views):
        return EXIT_UNREACHABLE
    if not views or any(view.snapshot is None or view.verdict.limit.value == "unknown" for view in views):
        return EXIT_UNKNOWN
    return EXIT_HEALTHY
