"""What one scrape says about each engine of a server, in our words. Pure.

Knows the names table and the page; no clock, no network, no rates (those need two readings). A value that the
page does not have, or has as NaN, is absent from its mapping. Values of a data-parallel rank's tensor-parallel
copies are taken once. Series without an engine label belong to the server: its first engine carries them. Floor 3.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvctl.metrics.exposition import Page, Sample, printable
from kvctl.metrics.histogram import Histogram
from kvctl.metrics.server_names import SERVER_NAMES, Counter, Gauge, Series, Server, Timing, detect_server

_TAKE_LARGEST = frozenset(
    (
        Gauge.KV_USAGE,
        Gauge.HIT_RATE,
        Gauge.OFFLOAD_USAGE,
        Gauge.ACCEPT_LENGTH,
        Gauge.AWAKE,
        Gauge.MAX_NUM_SEQS,
        Gauge.MAX_NUM_BATCHED_TOKENS,
        Gauge.MAX_MODEL_LEN,
    )
)
_SERVER_COUNTERS = frozenset((Counter.CPU_SECONDS, Counter.REJECTED))
_COPY_LABELS = ("tp_rank", "pp_rank", "moe_ep_rank")
_WAITING_REASONS = ("kvctl:num_requests_waiting_by_reason",)
_MISS_REASONS = ("kvctl:prefix_cache_miss_tokens_total",)
_INFO_SERIES = ("vllm:cache_config_info", "sglang:cache_config_info", "sglang_cache_config_info")
# Beyond these a page is not a server's, and a minute of its readings would fill the memory.
_MAX_ENGINES = 256
_MAX_REASONS = 32
_MAX_BUCKETS = 1000

EngineKey = tuple[str, str]  # model, engine


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What the server says of its KV cache. None: not said."""

    block_size: int | None = None  # tokens
    num_blocks: int | None = None
    capacity_tokens: int | None = None
    memory_bytes: int | None = None
    dtype: str | None = None
    prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None


@dataclass(slots=True)
class EngineReading:
    """One engine at one moment. Counters and timings are totals since the server's start."""

    at_s: float
    server: Server
    model: str
    engine: str
    gauges: dict[Gauge, float] = field(default_factory=dict)
    counters: dict[Counter, float] = field(default_factory=dict)
    timings: dict[Timing, Histogram] = field(default_factory=dict)
    waiting_reasons: dict[str, float] = field(default_factory=dict)  # a gauge per reason, kvctl only
    miss_reasons: dict[str, float] = field(default_factory=dict)  # a counter of tokens per reason, kvctl only
    settings: CacheSettings = CacheSettings()
    process_start_s: float | None = None
    max_loras: int | None = None

    @property
    def key(self) -> EngineKey:
        """What tells this engine from the others of the server."""
        return self.model, self.engine


EngineOf = Callable[[Mapping[str, str]], EngineReading | None]  # None: a copy, counted elsewhere


def read_engines(page: Page, at_s: float) -> list[EngineReading]:
    """Read every engine on the page, in the order of their names; empty where no inference server is seen."""
    server = detect_server(page)
    names = SERVER_NAMES[server]
    engines: dict[EngineKey, EngineReading] = {}

    def engine_of(labels: Mapping[str, str]) -> EngineReading | None:
        if any(labels.get(label, "0") != "0" for label in _COPY_LABELS):
            return None
        key = _first(labels, names.model_labels), _first(labels, names.engine_labels) or "0"
        reading = engines.get(key)
        if reading is None and len(engines) < _MAX_ENGINES:
            reading = engines[key] = EngineReading(at_s, server, printable(key[0]), printable(key[1], limit=20))
        return reading

    def is_whole_server(labels: Mapping[str, str]) -> bool:
        return bool(names.engine_labels) and not any(label in labels for label in names.engine_labels)

    whole_server: list[tuple[Counter, float]] = []
    whole_server_gauges: list[tuple[Gauge, float]] = []
    for gauge, choices in names.gauges.items():
        for sample in _present(page, choices):
            if not math.isfinite(sample.value):
                continue
            if is_whole_server(sample.labels) and not any(label in sample.labels for label in names.model_labels):
                whole_server_gauges.append((gauge, sample.value))
            elif reading := engine_of(sample.labels):
                before = reading.gauges.get(gauge)
                if before is None:
                    reading.gauges[gauge] = sample.value
                else:
                    largest = max(before, sample.value)
                    reading.gauges[gauge] = largest if gauge in _TAKE_LARGEST else before + sample.value
    for counter, choices in names.counters.items():
        for sample in _present(page, choices):
            if not math.isfinite(sample.value):
                continue
            if is_whole_server(sample.labels) and counter in _SERVER_COUNTERS:
                whole_server.append((counter, sample.value))
            elif reading := engine_of(sample.labels):
                reading.counters[counter] = reading.counters.get(counter, 0.0) + sample.value
    for timing, choices in names.timings.items():
        _read_timing(page, timing, choices, engine_of)
    if not engines and (whole_server_gauges or whole_server) and names.prefixes:
        engine_of({})
    ordered = [engines[key] for key in sorted(engines)]
    if ordered:
        for gauge, value in whole_server_gauges:
            for reading in ordered if gauge in _TAKE_LARGEST else ordered[:1]:
                reading.gauges.setdefault(gauge, value)
        _read_server_wide(page, ordered, whole_server)
        _read_reasons(page, engine_of)
        for reading in ordered:
            reading.settings = _read_settings(page, reading, single=len(ordered) == 1)
    return ordered


def _first(labels: Mapping[str, str], wanted: Iterable[str]) -> str:
    return next((labels[label] for label in wanted if label in labels), "")


def _present(page: Page, choices: tuple[Series, ...], suffix: str = "") -> Iterable[Sample]:
    """The samples of the first alternative name that the page has."""
    for series in choices:
        if series.name + suffix in page.series:
            return page.samples(series.name + suffix, **series.labels)
    return ()


def _read_timing(page: Page, timing: Timing, choices: tuple[Series, ...], engine_of: EngineOf) -> None:
    buckets: dict[EngineKey, dict[float, float]] = {}
    sums: dict[EngineKey, float] = {}
    counts: dict[EngineKey, float] = {}
    found: dict[EngineKey, EngineReading] = {}
    for sample in _present(page, choices, "_count"):
        if math.isfinite(sample.value) and (reading := engine_of(sample.labels)):
            found[reading.key] = reading
            counts[reading.key] = counts.get(reading.key, 0.0) + sample.value
    for sample in _present(page, choices, "_sum"):
        if math.isfinite(sample.value) and (reading := engine_of(sample.labels)):
            sums[reading.key] = sums.get(reading.key, 0.0) + sample.value
    for sample in _present(page, choices, "_bucket"):
        bound = _float(sample.labels.get("le"))
        if bound is not None and math.isfinite(sample.value) and (reading := engine_of(sample.labels)):
            of_engine = buckets.setdefault(reading.key, {})
            of_engine[bound] = of_engine.get(bound, 0.0) + sample.value
    for key, reading in found.items():
        of_engine = buckets.get(key, {})
        if len(of_engine) > _MAX_BUCKETS:
            continue
        bounds = tuple(sorted(of_engine))
        reading.timings[timing] = Histogram(
            bounds, tuple(of_engine[bound] for bound in bounds), sums.get(key), counts[key]
        )


def _read_server_wide(page: Page, engines: list[EngineReading], whole_server: list[tuple[Counter, float]]) -> None:
    start_s = page.value("process_start_time_seconds")
    max_loras = _int(page.label("vllm:lora_requests_info", "max_lora"))
    for reading in engines:
        reading.process_start_s = start_s
        reading.max_loras = max_loras
    for counter, value in whole_server:
        carriers = engines if counter is Counter.CPU_SECONDS else engines[:1]
        for reading in carriers:
            reading.counters[counter] = reading.counters.get(counter, 0.0) + value


def _read_reasons(page: Page, engine_of: EngineOf) -> None:
    for names, attribute in ((_WAITING_REASONS, "waiting_reasons"), (_MISS_REASONS, "miss_reasons")):
        for sample in _present(page, tuple(Series(name) for name in names)):
            reading = engine_of(sample.labels)
            reason = sample.labels.get("reason")
            if reading and reason and math.isfinite(sample.value):
                reasons: dict[str, float] = getattr(reading, attribute)
                if len(reasons) < _MAX_REASONS:
                    reasons[printable(reason, limit=40)] = sample.value


def _read_settings(page: Page, reading: EngineReading, *, single: bool) -> CacheSettings:
    labels: Mapping[str, str] = {}
    for name in _INFO_SERIES:
        for sample in page.series.get(name, ()):
            if single or sample.labels.get("engine", "0") == reading.engine:
                labels = sample.labels
    block_size = _int(labels.get("effective_attention_block_size")) or _int(
        labels.get("block_size") or labels.get("page_size")
    )
    num_blocks = _int(labels.get("num_gpu_blocks"))
    capacity = reading.gauges.get(Gauge.KV_CAPACITY_TOKENS)
    tokens = _int(labels.get("kv_cache_size_tokens")) if capacity is None else int(capacity)
    if tokens is None and block_size is not None and num_blocks is not None:
        tokens = block_size * num_blocks
    memory = reading.gauges.get(Gauge.KV_CACHE_BYTES)
    dtype = labels.get("cache_dtype")
    caching = labels.get("enable_prefix_caching")
    return CacheSettings(
        block_size=block_size,
        num_blocks=num_blocks,
        capacity_tokens=tokens,
        memory_bytes=_int(labels.get("kv_cache_memory_bytes")) if memory is None else int(memory),
        dtype=printable(dtype, limit=20) if dtype else None,
        prefix_caching=None if caching is None else caching.lower() in ("true", "1"),
        gpu_memory_utilization=_float(labels.get("gpu_memory_utilization")),
    )


def _float(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return None if value is None or math.isnan(value) else value


def _int(text: str | None) -> int | None:
    value = _float(text)
    return int(value) if value is not None and math.isfinite(value) and value > 0 else None
