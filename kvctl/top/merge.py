"""Several engines of a server as one: sums where things add up, weighted means and maxima where they do not.

Pure. The merged reading goes the same way as any other, so windows, restarts and quantiles need no second code;
a histogram whose bounds differ between engines is left out. Floor 3.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from kvctl.metrics.histogram import Histogram
from kvctl.metrics.server_names import Counter, Gauge, Timing
from kvctl.top.reading import CacheSettings, EngineReading

_MEAN = frozenset((Gauge.KV_USAGE, Gauge.HIT_RATE, Gauge.OFFLOAD_USAGE, Gauge.ACCEPT_LENGTH))
_LARGEST = frozenset((Gauge.MAX_NUM_BATCHED_TOKENS, Gauge.MAX_MODEL_LEN, Gauge.AWAKE))


def merge_readings(readings: Sequence[EngineReading]) -> EngineReading:
    """Return all engines of one scrape as one, named 'all'."""
    first = readings[0]
    models = {reading.model for reading in readings}
    merged = EngineReading(
        first.at_s, first.server, first.model if len(models) == 1 else f"{len(models)} models", "all"
    )
    merged.process_start_s, merged.max_loras = first.process_start_s, first.max_loras
    merged.settings = _merge_settings([reading.settings for reading in readings])
    for gauge in Gauge:
        having = [reading for reading in readings if gauge in reading.gauges]
        if len(having) < len(readings):
            continue  # a sum over some of the engines would be a lie
        values = [reading.gauges[gauge] for reading in having]
        if gauge in _MEAN:
            weights = [reading.settings.capacity_tokens or 0 for reading in having]
            weights = weights if all(weights) else [1] * len(values)
            merged.gauges[gauge] = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
        else:
            merged.gauges[gauge] = max(values) if gauge in _LARGEST else sum(values)
    for counter in Counter:
        counts = [reading.counters[counter] for reading in readings if counter in reading.counters]
        if counts:
            merged.counters[counter] = max(counts) if counter is Counter.CPU_SECONDS else sum(counts)
    for timing in Timing:
        histogram = _merge_histograms([reading.timings.get(timing) for reading in readings])
        if histogram is not None:
            merged.timings[timing] = histogram
    for reading in readings:
        for into, found in (
            (merged.waiting_reasons, reading.waiting_reasons),
            (merged.miss_reasons, reading.miss_reasons),
        ):
            for reason, value in found.items():
                into[reason] = into.get(reason, 0.0) + value
    return merged


def _merge_histograms(histograms: Sequence[Histogram | None]) -> Histogram | None:
    def add(a: Histogram | None, b: Histogram | None) -> Histogram | None:
        return None if a is None or b is None else a.plus(b)

    return reduce(add, histograms)


def _merge_settings(settings: Sequence[CacheSettings]) -> CacheSettings:
    def total(values: Sequence[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    return replace(
        settings[0],
        num_blocks=total([one.num_blocks for one in settings]),
        capacity_tokens=total([one.capacity_tokens for one in settings]),
        memory_bytes=total([one.memory_bytes for one in settings]),
    )
