"""Where scrapes come from: the protocol, and live servers behind it.

A source is started with a function that takes each scrape as it comes (from another thread), and stopped. Live
endpoints are asked each in a thread of its own, so that one that hangs delays no other. Floor 3.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kvctl.top.endpoint import Endpoint
from kvctl.top.scrape import Scrape, ScrapeOptions, Scraper, SteadyClock

Deliver = Callable[[Scrape], None]
_RECONNECT_S = 5.0  # a dead endpoint with a long interval is asked this often


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
