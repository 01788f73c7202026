"""Reads the server's own metrics before, during and after a run, on the clock of the run.

A thread fetches pages and keeps them compressed; they are parsed when the run is over, so that reading 100 KB of
text costs the load nothing. Knows readings by `metrics.server_names`; a server without metrics gives None. Floor 3.
"""

import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import httpx

from kvctl.metrics.exposition import Page, parse_page
from kvctl.metrics.histogram import Histogram
from kvctl.metrics.server_names import SERVER_NAMES, Counter, Gauge, Series, Server, Timing, detect_server

_MIN_INTERVAL_S = 0.25
_MAX_PAGES = 1200


@dataclass(frozen=True)
class Reading:
    """What one page said. None: this server does not say."""

    time_s: float
    gauges: Mapping[Gauge, float]
    counters: Mapping[Counter, float]
    step_tokens: Histogram | None


class ServerMonitor:
    """Fetches `/metrics` at an interval until stopped."""

    def __init__(self, url: str, headers: Mapping[str, str], *, interval_s: float, verify_tls: bool = True) -> None:
        self._url = url
        self._interval_s = max(interval_s, _MIN_INTERVAL_S)
        self._client = httpx.Client(headers=dict(headers), verify=verify_tls, timeout=5.0, trust_env=False)
        self._pages: list[tuple[float, bytes]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="server-monitor", daemon=True)
        self.is_available = self._fetch()

    def start(self) -> None:
        """Begin to poll, if there is anything."""
        if self.is_available:
            self._thread.start()

    def stop(self) -> list[Reading]:
        """Fetch once more, end, and return what all pages said, in order."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        if self.is_available:
            self._fetch()
        self._client.close()
        readings = []
        server: Server | None = None
        for time_s, compressed in self._pages:
            page = parse_page(zlib.decompress(compressed))
            if server is None or server is Server.UNKNOWN:
                server = detect_server(page)
            readings.append(_read(page, server, time_s))
        self.server = server
        return readings

    server: Server | None = None

    def _poll(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._fetch()
            if len(self._pages) >= _MAX_PAGES:  # a long run: every second page is enough from now on
                self._pages = self._pages[::2]
                self._interval_s *= 2

    def _fetch(self) -> bool:
        try:
            begin_s = perf_counter()
            response = self._client.get(self._url)
            time_s = (begin_s + perf_counter()) / 2
        except httpx.HTTPError:
            return False
        if response.status_code != 200 or response.content.lstrip()[:1] in (b"<", b"{"):
            return False
        self._pages.append((time_s, zlib.compress(response.content, 1)))
        return True


def _read(page: Page, server: Server, time_s: float) -> Reading:
    names = SERVER_NAMES[server]
    gauges = {gauge: value for gauge, series in names.gauges.items() if (value := _value(page, series)) is not None}
    usage = gauges.get(Gauge.KV_USAGE)
    if usage is not None:  # several engines: the page's sum is of shares
        num_engines = sum(1 for name in names.gauges[Gauge.KV_USAGE] for _ in page.samples(name.name, **name.labels))
        gauges[Gauge.KV_USAGE] = usage / max(1, num_engines)
    counters = {c: value for c, series in names.counters.items() if (value := _value(page, series)) is not None}
    step_tokens = None
    for series in names.timings.get(Timing.STEP_TOKENS, ()):
        step_tokens = step_tokens or page.histogram(series.name, **series.labels)
    return Reading(time_s, gauges, counters, step_tokens)


def _value(page: Page, alternatives: tuple[Series, ...]) -> float | None:
    for series in alternatives:
        value = page.value(series.name, **series.labels)
        if value is not None:
            return value
    return None
