"""Reads the server's own metrics before, during and after a run, on the clock of the run, in a process of its own.

A thread of the load's process would hold the interpreter for milliseconds at a time and make requests late; another
process does not. Readings come back when the run is over. Knows readings by `metrics.server_names`; a server without
metrics gives none. Floor 3.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter

import httpx

from kvctl.bench.tls import tls_context
from kvctl.metrics.exposition import Page, parse_page
from kvctl.metrics.histogram import Histogram
from kvctl.metrics.server_names import SERVER_NAMES, Counter, Gauge, Series, Server, Timing, detect_server

_MIN_INTERVAL_S = 0.25
_MAX_READINGS = 4000
_START_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Reading:
    """What one page said. None: this server does not say."""

    time_s: float
    gauges: Mapping[Gauge, float]
    counters: Mapping[Counter, float]
    step_tokens: Histogram | None


@dataclass(frozen=True)
class MonitorConfig:
    """Which page is read, and how often."""

    url: str
    headers: Mapping[str, str]
    interval_s: float
    verify_tls: bool = True


class ServerMonitor:
    """Starts reading at once; `stop` reads once more and gives everything back."""

    def __init__(self, config: MonitorConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_watch, args=(config, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.is_available = False
        with contextlib.suppress(EOFError):
            if self._pipe.poll(_START_TIMEOUT_S):
                self.is_available = bool(self._pipe.recv())

    def stop(self) -> tuple[list[Reading], Server | None]:
        """End; returns what all pages said, in order, and the kind of server (None: no metrics)."""
        result: tuple[list[Reading], Server | None] = ([], None)
        with contextlib.suppress(EOFError, BrokenPipeError):
            if self.is_available:
                self._pipe.send(None)
                if self._pipe.poll(_START_TIMEOUT_S):
                    result = self._pipe.recv()
        self._pipe.close()
        self._process.join(timeout=2)
        if self._process.is_alive():
            self._process.terminate()
        return result


def _watch(config: MonitorConfig, pipe: "Connection[object, object]") -> None:
    """The process: read until something comes through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair; it tells us when to stop
    readings: list[Reading] = []
    server: Server | None = None
    interval_s = max(config.interval_s, _MIN_INTERVAL_S)
    with (
        httpx.Client(
            headers=dict(config.headers), verify=tls_context(config.verify_tls), timeout=5.0, trust_env=False
        ) as client,
        contextlib.suppress(EOFError, BrokenPipeError),
    ):

        def read() -> bool:
            nonlocal server
            begin_s = perf_counter()
            try:
                response = client.get(config.url)
            except httpx.HTTPError:
                return False
            time_s = (begin_s + perf_counter()) / 2
            if response.status_code != 200 or response.content.lstrip()[:1] in (b"<", b"{"):
                return False
            page = parse_page(response.content)
            if server is None or server is Server.UNKNOWN:
                server = detect_server(page)
            readings.append(_read(page, server, time_s))
            return True

        pipe.send(read())
        while readings and not pipe.poll(interval_s):
            read()
            if len(readings) >= _MAX_READINGS:  # a long run: every second one is enough from now on
                del readings[1::2]
                interval_s *= 2
        read()
        pipe.send((readings, server))


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
