"""Keeps what each endpoint said lately and turns it into what is shown. No network, no clock of its own.

Scrapes go in, in time order; a `FleetView` comes out for any moment. Each engine keeps its full readings for the
longest window and one `Point` per interval for the graphs, both bounded, so that an hour weighs what a minute does.
An endpoint that stops answering keeps its last numbers, marked stale with their age. Floor 3.
"""

from collections import deque
from dataclasses import dataclass, field

from kvctl.metrics.exposition import parse_page, printable
from kvctl.top.case import Point
from kvctl.top.diagnose import diagnose, unanswered
from kvctl.top.merge import merge_readings
from kvctl.top.reading import EngineKey, EngineReading, read_engines
from kvctl.top.scrape import Scrape
from kvctl.top.snapshot import Snapshot, take_snapshot
from kvctl.top.timing import WINDOWS_S
from kvctl.top.verdict import Limit, Verdict
from kvctl.top.window import current_regime, readings_within

DIAGNOSIS_WINDOW_S = 10.0  # short, so that a verdict follows its onset; long enough to tell a queue from an arrival
MAX_READINGS = 700  # 60 s at ten scrapes a second, and some
MAX_POINTS = 900
_MAX_SERIES = 100_000  # twice what the largest server has, read in under a second
_SUMMED: EngineKey = ("", "all")
_PREFIXES = ("vllm:", "kvctl:", "sglang", "tgi_", "llamacpp:", "trtllm", "process_")


@dataclass(frozen=True, slots=True)
class Digest:
    """What there is to know of one scrape: the readings of its engines, or the error."""

    url: str
    at_s: float
    readings: tuple[EngineReading, ...]
    error: str | None
    num_rejected_lines: int = 0
    truncated: str | None = None


def digest_scrape(scrape: Scrape) -> Digest:
    """Read a scrape's page: the part that takes time, and needs nothing but the scrape."""
    if scrape.text is None:
        return Digest(scrape.url, scrape.at_s, (), scrape.error or "no answer")
    page = parse_page(scrape.text, max_series=_MAX_SERIES, prefixes=_PREFIXES)
    readings = tuple(read_engines(page, scrape.at_s))
    return Digest(scrape.url, scrape.at_s, readings, None, page.num_rejected, page.truncated)


@dataclass(frozen=True, slots=True)
class EngineView:
    """One row of the table and everything behind it. `snapshot` is None where the endpoint never answered."""

    url: str
    label: str
    snapshot: Snapshot | None
    verdict: Verdict
    points: tuple[Point, ...]
    age_s: float | None  # since the last good page
    is_stale: bool
    error: str | None
    num_rejected_lines: int = 0
    truncated: str | None = None
    is_foreign: bool = False  # it answers, with something that is no inference server's page

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the row from frame to frame."""
        snapshot = self.snapshot
        return self.url, snapshot.model if snapshot else "", snapshot.engine if snapshot else ""


@dataclass(frozen=True, slots=True)
class FleetView:
    """All engines at one moment."""

    at_s: float
    window_s: float
    engines: tuple[EngineView, ...]


@dataclass
class _EngineTrack:
    readings: deque[EngineReading] = field(default_factory=lambda: deque(maxlen=MAX_READINGS))
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))

    def add(self, reading: EngineReading) -> None:
        if self.readings and reading.at_s <= self.readings[-1].at_s:
            return
        self.readings.append(reading)
        oldest_s = reading.at_s - WINDOWS_S[-1] * 1.1
        while len(self.readings) > 2 and self.readings[0].at_s < oldest_s:
            self.readings.popleft()
        if len(self.readings) >= 2:
            self.points.append(_point(take_snapshot([self.readings[-2], reading])))


class EndpointTrack:
    """What one endpoint said lately."""

    def __init__(self, url: str, label: str, interval_s: float) -> None:
        self.url = url
        self.label = label
        self._stale_after_s = max(3.0, 3.5 * interval_s)
        self._engines: dict[EngineKey, _EngineTrack] = {}
        self._summed = _EngineTrack()
        self._answered_s: float | None = None
        self._error: str | None = None
        self._rejected = 0
        self._truncated: str | None = None
        self._is_foreign = False

    def take(self, digest: Digest) -> None:
        """Take one scrape, good or bad."""
        if digest.error is not None:
            self._error, self._is_foreign = digest.error, False
            return
        self._rejected, self._truncated = digest.num_rejected_lines, digest.truncated
        self._answered_s, self._error = digest.at_s, None
        readings = digest.readings
        for reading in readings:
            self._engines.setdefault(reading.key, _EngineTrack()).add(reading)
        present = {reading.key for reading in readings}
        for gone in [key for key in self._engines if key not in present]:
            del self._engines[gone]
        self._is_foreign = not readings
        if len(readings) > 1:
            self._summed.add(merge_readings(readings))
        elif not readings:
            self._error = "the page has no names of an inference server"

    def views(self, now_s: float, window_s: float, *, summed: bool) -> list[EngineView]:
        """Return one view per engine, or one for all together."""
        tracks = list(self._engines.values())
        if summed and len(tracks) > 1:
            tracks = [self._summed]
        age_s = None if self._answered_s is None else max(0.0, now_s - self._answered_s)
        if not tracks:
            return [self._view(None, unanswered(self._error, is_foreign=self._is_foreign), (), age_s)]
        views = []
        for track in tracks:
            readings = list(track.readings)
            snapshot = take_snapshot(readings_within(readings, window_s))
            recent = take_snapshot(current_regime(readings_within(readings, DIAGNOSIS_WINDOW_S)))
            points = tuple(track.points)
            views.append(self._view(snapshot, diagnose(recent, points), points, age_s))
        return views

    def _view(
        self, snapshot: Snapshot | None, verdict: Verdict, points: tuple[Point, ...], age_s: float | None
    ) -> EngineView:
        is_stale = self._error is not None or (age_s is not None and age_s > self._stale_after_s)
        return EngineView(
            self.url,
            self.label,
            snapshot,
            verdict,
            points,
            age_s,
            is_stale,
            self._error,
            self._rejected,
            self._truncated,
            self._is_foreign,
        )


class Monitor:
    """All endpoints of a session."""

    def __init__(self, labels: dict[str, str], interval_s: float) -> None:
        self._interval_s = interval_s
        self._tracks = {url: EndpointTrack(url, label, interval_s) for url, label in labels.items()}

    def add(self, scrape: Scrape) -> None:
        """Take one scrape."""
        self.take(digest_scrape(scrape))

    def take(self, digest: Digest) -> None:
        """Take what was read from one scrape; an endpoint not named before (a replay) is added."""
        track = self._tracks.get(digest.url)
        if track is None:
            label = printable(digest.url.split("://", 1)[-1].removesuffix("/metrics"))
            track = self._tracks[digest.url] = EndpointTrack(digest.url, label, self._interval_s)
        track.take(digest)

    def view(self, now_s: float, window_s: float, *, summed: bool = False) -> FleetView:
        """Return everything at this moment."""
        engines = [v for track in self._tracks.values() for v in track.views(now_s, window_s, summed=summed)]
        return FleetView(now_s, window_s, tuple(engines))


def worst_limit(fleet: FleetView) -> Limit:
    """Return the verdict of all together: a limit that binds before unknown before idle or healthy."""
    limits = [view.verdict.limit for view in fleet.engines]
    binding = [limit for limit in limits if limit.binds]
    if binding:
        return binding[0]
    if not limits or Limit.UNKNOWN in limits:
        return Limit.UNKNOWN
    return Limit.HEALTHY if Limit.HEALTHY in limits else Limit.IDLE


def _point(snapshot: Snapshot) -> Point:
    return Point(
        at_s=snapshot.at_s,
        running=snapshot.running,
        waiting=snapshot.waiting,
        kv_usage=snapshot.kv_usage,
        generation_tokens_per_s=snapshot.generation_tokens_per_s,
        prompt_tokens_per_s=snapshot.prompt_tokens_per_s,
        itl_mean_s=snapshot.itl_s.mean if snapshot.itl_s else None,
        ttft_mean_s=snapshot.ttft_s.mean if snapshot.ttft_s else None,
        prefix_hit_rate=snapshot.prefix_hit_rate,
        preemptions_per_s=snapshot.preemptions_per_s,
    )
