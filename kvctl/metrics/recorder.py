"""Recorder: where measured values go, by the names of `metrics.definitions`.

Knows the table and nothing of requests or steps. A caller asks once for a series (`recorder.counter(name, ...)`) and
keeps it: recording a value is an addition, without a lookup or a lock. Everything that records runs in one thread.

`InMemoryRecorder` keeps the values (tests, simulator); `PrometheusRecorder` also prints them as a /metrics page, on
a registry of its own. prometheus_client is imported by the latter only, when it is built. Floor 0.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Protocol

from kvctl.metrics.definitions import COMMON_LABELS, METRICS, MetricDef, MetricKind, token_buckets

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class CounterSeries:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`.

        Raises:
            ValueError: a negative amount.
        """
        if amount < 0:
            raise ValueError(f"a counter cannot go down by {-amount}")
        self.value += amount


class GaugeSeries:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value


class HistogramSeries:
    """Counts of values per bucket; a value on a bound belongs to the bucket below it."""

    __slots__ = ("bounds", "bucket_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.bucket_counts = [0] * (len(bounds) + 1)  # the last one is up to infinity
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.bucket_counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.bucket_counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield (upper bound as Prometheus writes it, number of values up to it)."""
        names = [repr(bound) for bound in self.bounds] + ["+Inf"]
        return zip(names, accumulate(self.bucket_counts), strict=True)


class Recorder(Protocol):
    """Gives out series. The label values are those of the family's own labels, by name."""

    def counter(self, name: str, **labels: str) -> CounterSeries:
        """Return the series of a counter."""
        ...

    def gauge(self, name: str, **labels: str) -> GaugeSeries:
        """Return the series of a gauge."""
        ...

    def histogram(self, name: str) -> HistogramSeries:
        """Return the series of a histogram."""
        ...


class InMemoryRecorder:
    """Keeps all series. Families whose label values are known start at 0."""

    def __init__(self, *, max_model_len: int = 1 << 20) -> None:
        self._token_buckets = token_buckets(max_model_len)
        self._counters: dict[str, dict[tuple[str, ...], CounterSeries]] = {}
        self._gauges: dict[str, dict[tuple[str, ...], GaugeSeries]] = {}
        self._histograms: dict[str, HistogramSeries] = {}
        for definition in METRICS.values():
            self._prepare(definition)

    def counter(self, name: str, **labels: str) -> CounterSeries:
        """Return the series of a counter, a new one where the label values are new."""
        return self._counters[name].setdefault(_label_key(name, labels), CounterSeries())

    def gauge(self, name: str, **labels: str) -> GaugeSeries:
        """Return the series of a gauge, a new one where the label values are new."""
        return self._gauges[name].setdefault(_label_key(name, labels), GaugeSeries())

    def histogram(self, name: str) -> HistogramSeries:
        """Return the series of a histogram."""
        return self._histograms[name]

    def _prepare(self, definition: MetricDef) -> None:
        keys = [(value,) for value in definition.label_values] if definition.labels else [()]
        match definition.kind:
            case MetricKind.COUNTER:
                self._counters[definition.name] = {key: CounterSeries() for key in keys}
            case MetricKind.GAUGE:
                self._gauges[definition.name] = {key: GaugeSeries() for key in keys}
            case MetricKind.HISTOGRAM:
                bounds = self._token_buckets if definition.buckets is None else definition.buckets
                self._histograms[definition.name] = HistogramSeries(bounds)


def _label_key(name: str, labels: dict[str, str]) -> tuple[str, ...]:
    expected = METRICS[name].labels
    if len(labels) != len(expected):
        raise ValueError(f"{name} has the labels {expected}, not {tuple(labels)}")
    return tuple(labels[label] for label in expected)


class PrometheusRecorder(InMemoryRecorder):
    """An InMemoryRecorder with a /metrics page, which also shows this process (`process_*`, `python_*`).

    Args:
        model_name: the served name, a label of every series.
        registry: where to collect; a new one by default, never the global one.
    """

    content_type: Final = CONTENT_TYPE

    def __init__(
        self,
        *,
        model_name: str,
        max_model_len: int,
        engine: str = "0",
        registry: "CollectorRegistry | None" = None,
    ) -> None:
        from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

        super().__init__(max_model_len=max_model_len)
        self.registry = CollectorRegistry() if registry is None else registry
        self._common = dict(zip(COMMON_LABELS, (model_name, engine), strict=True))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.registry.register(self)

    def watch_engine_process(self, pid: Callable[[], int]) -> None:
        """Also show the engine process, as `kvctl_engine_process_*`: the API process has not its memory."""
        from prometheus_client import ProcessCollector

        ProcessCollector(namespace="kvctl_engine", pid=pid, registry=self.registry)

    def render(self) -> bytes:
        """Return the page, in the text format that every scraper reads (`content_type`)."""
        from prometheus_client import generate_latest

        page: bytes = generate_latest(self.registry)
        return page

    def collect(self) -> "Iterable[Metric]":
        """Yield all families: prometheus_client's side of a collector."""
        from prometheus_client.metrics_core import Metric

        for definition in METRICS.values():
            family = Metric(definition.name, definition.help, definition.kind.value)
            match definition.kind:
                case MetricKind.COUNTER:
                    for key, counter in self._counters[definition.name].items():
                        family.add_sample(definition.exposed_name, self._labels(definition, key), counter.value)
                case MetricKind.GAUGE:
                    for key, gauge in self._gauges[definition.name].items():
                        family.add_sample(definition.name, self._labels(definition, key), gauge.value)
                case MetricKind.HISTOGRAM:
                    self._add_histogram(family, self._histograms[definition.name])
            yield family

    def _labels(self, definition: MetricDef, key: tuple[str, ...]) -> dict[str, str]:
        return self._common | dict(zip(definition.labels, key, strict=True))

    def _add_histogram(self, family: "Metric", series: HistogramSeries) -> None:
        for bound, number in series.cumulative():
            family.add_sample(f"{family.name}_bucket", self._common | {"le": bound}, number)
        family.add_sample(f"{family.name}_count", self._common, series.count)
        family.add_sample(f"{family.name}_sum", self._common, series.sum)
