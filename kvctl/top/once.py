"""Two scrapes of each endpoint, an interval apart: what `kvctl top --once` does before it prints. Floor 3."""

import threading
import time
from collections.abc import Callable, Sequence

from kvctl.top.endpoint import Endpoint
from kvctl.top.monitor import FleetView, Monitor
from kvctl.top.scrape import Scrape, ScrapeOptions, Scraper, SteadyClock
from kvctl.top.verdict import Limit

EXIT_CODES = {"healthy": 0, "unreachable": 1, "unknown": 3, "limit": 10}


def watch_once(
    endpoints: Sequence[Endpoint],
    options: ScrapeOptions,
    interval_s: float,
    *,
    summed: bool = False,
    record: Callable[[Scrape], None] | None = None,
) -> FleetView:
    """Scrape every endpoint twice, all at the same time, and return what was seen."""
    clock = SteadyClock()
    monitor = Monitor({endpoint.url: endpoint.label for endpoint in endpoints}, interval_s)
    lock = threading.Lock()

    def ask(endpoint: Endpoint) -> None:
        scraper = Scraper(endpoint, options, clock)
        began = time.monotonic()
        try:
            for number in range(2):
                if number:
                    time.sleep(max(0.0, interval_s - (time.monotonic() - began)))
                scrape = scraper.scrape()
                with lock:
                    monitor.add(scrape)
                    if record is not None:
                        record(scrape)
                if scrape.text is None:
                    return
        finally:
            scraper.close()

    threads = [threading.Thread(target=ask, args=(endpoint,), daemon=True) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return monitor.view(clock(), interval_s, summed=summed)


def exit_code(fleet: FleetView) -> int:
    """0 healthy or idle; 10 a limit binds anywhere; 1 an endpoint did not answer; 3 cannot tell."""
    if any(view.verdict.limit.binds and not view.is_stale for view in fleet.engines):
        return EXIT_CODES["limit"]
    if any(view.snapshot is None or view.error is not None for view in fleet.engines):
        silent = any(view.age_s is None or view.snapshot is not None for view in fleet.engines if view.error)
        return EXIT_CODES["unreachable"] if silent else EXIT_CODES["unknown"]
    if any(view.verdict.limit is Limit.UNKNOWN for view in fleet.engines):
        return EXIT_CODES["unknown"]
    return EXIT_CODES["healthy"]
