"""One engine over one window, in numbers a person can trust: what the screen, the JSON and the diagnosis read.

Pure: readings in, numbers out. None means that the server does not say or that nothing was observed; it is never
shown as 0. Rates and means are differences over the stated window, quantiles keep their bracket. Floor 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.metrics.histogram import Histogram, Quantile
from kvctl.metrics.server_names import Counter, Gauge, Server, Timing
from kvctl.top.reading import CacheSettings, EngineReading
from kvctl.top.window import Window, measure, trace

_GROWTH_SEEN = 0.01  # of the cache over the window: less is noise
_FULL_AT = 1.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram observed in the window: the exact mean and quantiles with their brackets."""

    count: float
    mean: float | None
    p50: Quantile | None
    p90: Quantile | None
    p99: Quantile | None


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens of an observed request, prompt and output together, and where the figure comes from."""

    prompt_tokens: float
    generation_tokens: float
    source: str  # "finished in the window", "finished since the start", "held by each running request now"

    @property
    def tokens(self) -> float:
        """Prompt and output together."""
        return self.prompt_tokens + self.generation_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """The window's gauges in time order, for what a single value cannot say (a flat top, a growing queue)."""

    running: tuple[float, ...]
    waiting: tuple[float, ...]
    kv_usage: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One engine over one window. Totals are tokens or requests; rates are per second."""

    at_s: float
    server: Server
    model: str
    engine: str
    window_s: float | None  # None: one reading only, so no rates
    num_readings: int
    num_restarts: int
    running: float | None
    waiting: float | None
    waiting_capacity: float | None
    waiting_deferred: float | None
    waiting_reasons: dict[str, float]  # requests, mean over the window
    kv_usage: float | None
    kv_capacity_tokens: int | None
    kv_used_tokens: float | None
    kv_cache_bytes: int | None
    request_size: RequestSize | None
    headroom_requests: int | None
    time_to_full_s: float | None
    prefix_hit_rate: float | None
    prefix_hit_rate_before: float | None  # from the start of the server to the start of the window
    prefix_queries: float | None  # tokens looked up in the window
    miss_reasons: dict[str, float]  # tokens in the window
    preemptions_per_s: float | None
    preemptions: float | None  # in the window
    prompt_tokens_per_s: float | None
    computed_prompt_tokens_per_s: float | None  # without those found in the cache
    generation_tokens_per_s: float | None
    finished_per_s: float | None
    rejected_per_s: float | None
    steps_per_s: float | None
    step_tokens: Distribution | None
    step_tokens_histogram: Histogram | None  # of the window; since the start where the window has none
    ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    queue_s: Distribution | None
    prefill_s: Distribution | None
    decode_s: Distribution | None
    step_duration_s: Distribution | None
    slowest_step_s: float | None  # upper bound of what a step has taken since the start
    block_idle_before_evict_s: Distribution | None
    block_reuse_gap_s: Distribution | None
    acceptance_rate: float | None  # speculative decoding: accepted of drafted tokens
    accept_length: float | None  # tokens per step and request with it
    offload_usage: float | None
    cpu_cores: float | None  # of the process that serves the page
    is_awake: bool | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    max_loras: int | None
    written_tokens: float | None  # prompt and output tokens computed since the server's start: what the cache saw
    settings: CacheSettings
    trace: Trace

    @property
    def kv_used_bytes(self) -> float | None:
        """Bytes of the KV cache that running requests hold."""
        return None if self.kv_cache_bytes is None or self.kv_usage is None else self.kv_cache_bytes * self.kv_usage


def take_snapshot(readings: Sequence[EngineReading]) -> Snapshot:
    """Turn the readings of one window (one engine, oldest first, at least one) into a snapshot of its end."""
    last = readings[-1]
    window = measure(readings)
    gauges = last.gauges
    running, usage = gauges.get(Gauge.RUNNING), gauges.get(Gauge.KV_USAGE)
    capacity = last.settings.capacity_tokens
    used = gauges.get(Gauge.KV_USED_TOKENS)
    if used is None and usage is not None and capacity is not None:
        used = usage * capacity
    if usage is None and used is not None and capacity:
        usage = used / capacity
    size = _request_size(last, window, running, used)
    traces = Trace(*(trace(readings, gauge) for gauge in (Gauge.RUNNING, Gauge.WAITING, Gauge.KV_USAGE)))
    hits, queries = _counted(window, Counter.PREFIX_HITS), _counted(window, Counter.PREFIX_QUERIES)
    drafted, accepted = _counted(window, Counter.DRAFT_TOKENS), _counted(window, Counter.ACCEPTED_TOKENS)
    drafts = _counted(window, Counter.DRAFTS)
    prompt_rate, cached_rate = _rate(window, Counter.PROMPT_TOKENS), _rate(window, Counter.CACHED_PROMPT_TOKENS)
    steps = None if window is None else window.timings.get(Timing.STEP_TOKENS)
    awake = gauges.get(Gauge.AWAKE)

    def spread(timing: Timing) -> Distribution | None:
        return None if window is None else distribution(window.timings.get(timing))

    return Snapshot(
        at_s=last.at_s,
        server=last.server,
        model=last.model,
        engine=last.engine,
        window_s=None if window is None else window.duration_s,
        num_readings=len(readings),
        num_restarts=0 if window is None else window.num_restarts,
        running=running,
        waiting=gauges.get(Gauge.WAITING),
        waiting_capacity=gauges.get(Gauge.WAITING_CAPACITY),
        waiting_deferred=gauges.get(Gauge.WAITING_DEFERRED),
        waiting_reasons=_mean_reasons(readings),
        kv_usage=usage,
        kv_capacity_tokens=capacity,
        kv_used_tokens=used,
        kv_cache_bytes=last.settings.memory_bytes,
        request_size=size,
        headroom_requests=_headroom(used, capacity, size),
        time_to_full_s=_time_to_full(traces.kv_usage, None if window is None else window.duration_s),
        prefix_hit_rate=_prefix_hit_rate(hits, queries, gauges),
        prefix_hit_rate_before=_hit_rate_before(readings[0]),
        prefix_queries=queries,
        miss_reasons={} if window is None else window.miss_reasons,
        preemptions_per_s=_rate(window, Counter.PREEMPTIONS),
        preemptions=_counted(window, Counter.PREEMPTIONS),
        prompt_tokens_per_s=prompt_rate,
        computed_prompt_tokens_per_s=None if prompt_rate is None else max(0.0, prompt_rate - (cached_rate or 0.0)),
        generation_tokens_per_s=_generation_rate(window, gauges),
        finished_per_s=_rate(window, Counter.FINISHED),
        rejected_per_s=_rate(window, Counter.REJECTED),
        steps_per_s=_steps_per_s(window),
        step_tokens=distribution(steps),
        step_tokens_histogram=steps if steps and steps.count else last.timings.get(Timing.STEP_TOKENS),
        ttft_s=spread(Timing.TTFT),
        itl_s=spread(Timing.ITL),
        tpot_s=spread(Timing.TPOT),
        e2e_s=spread(Timing.E2E),
        queue_s=spread(Timing.QUEUE),
        prefill_s=spread(Timing.PREFILL),
        decode_s=spread(Timing.DECODE),
        step_duration_s=spread(Timing.STEP_DURATION),
        slowest_step_s=_slowest_step(last),
        block_idle_before_evict_s=spread(Timing.BLOCK_IDLE_BEFORE_EVICT),
        block_reuse_gap_s=spread(Timing.BLOCK_REUSE_GAP),
        acceptance_rate=_ratio(accepted, drafted),
        accept_length=gauges.get(Gauge.ACCEPT_LENGTH) if (length := _ratio(accepted, drafts)) is None else 1.0 + length,
        offload_usage=gauges.get(Gauge.OFFLOAD_USAGE),
        cpu_cores=_rate(window, Counter.CPU_SECONDS),
        is_awake=None if awake is None else awake > 0,
        max_num_seqs=_whole(gauges.get(Gauge.MAX_NUM_SEQS)),
        max_num_batched_tokens=_whole(gauges.get(Gauge.MAX_NUM_BATCHED_TOKENS)),
        max_model_len=_whole(gauges.get(Gauge.MAX_MODEL_LEN)),
        max_loras=last.max_loras,
        written_tokens=_written(last),
        settings=last.settings,
        trace=traces,
    )


def distribution(histogram: Histogram | None) -> Distribution | None:
    """Return the spread of what was observed; None where nothing was."""
    if histogram is None or not histogram.count:
        return None
    return Distribution(
        histogram.count,
        histogram.mean,
        histogram.quantile(0.5),
        histogram.quantile(0.9),
        histogram.quantile(0.99),
    )


def _mean_reasons(readings: Sequence[EngineReading]) -> dict[str, float]:
    """Average over the window: a single moment of a changing queue says little."""
    reasons = {reason for reading in readings for reason in reading.waiting_reasons}
    return {r: sum(one.waiting_reasons.get(r, 0.0) for one in readings) / len(readings) for r in sorted(reasons)}


def _rate(window: Window | None, counter: Counter) -> float | None:
    return None if window is None else window.rate(counter)


def _counted(window: Window | None, counter: Counter) -> float | None:
    return None if window is None else window.counters.get(counter)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and value >= 1 else None


def _prefix_hit_rate(hits: float | None, queries: float | None, gauges: dict[Gauge, float]) -> float | None:
    """From the window's counters; the server's own rate only where it has no such counters."""
    return gauges.get(Gauge.HIT_RATE) if hits is None or queries is None else _ratio(hits, queries)


def _hit_rate_before(first: EngineReading) -> float | None:
    return _ratio(first.counters.get(Counter.PREFIX_HITS), first.counters.get(Counter.PREFIX_QUERIES))


def _generation_rate(window: Window | None, gauges: dict[Gauge, float]) -> float | None:
    counted = _rate(window, Counter.GENERATION_TOKENS)
    return gauges.get(Gauge.GENERATION_RATE) if counted is None else counted


def _steps_per_s(window: Window | None) -> float | None:
    if window is None:
        return None
    steps = window.timings.get(Timing.STEP_TOKENS)
    if steps is not None and steps.count is not None:
        return steps.count / window.duration_s
    return window.rate(Counter.STEPS)


def _slowest_step(reading: EngineReading) -> float | None:
    """From the step durations; else from the gaps between tokens, which hold whole steps."""
    histogram = reading.timings.get(Timing.STEP_DURATION) or reading.timings.get(Timing.ITL)
    top = histogram.top_bucket() if histogram is not None else None
    return None if top is None else top[1]


def _written(reading: EngineReading) -> float | None:
    prompt, output = reading.counters.get(Counter.PROMPT_TOKENS), reading.counters.get(Counter.GENERATION_TOKENS)
    if prompt is None or output is None:
        return None
    return prompt + output - reading.counters.get(Counter.CACHED_PROMPT_TOKENS, 0.0)


def _request_size(
    last: EngineReading, window: Window | None, running: float | None, used: float | None
) -> RequestSize | None:
    """The best answer to 'how large is a request here', with its source."""
    for timings, source in (
        ({} if window is None else window.timings, "finished in the window"),
        (last.timings, "finished since the start"),
    ):
        prompt, output = timings.get(Timing.REQUEST_PROMPT_TOKENS), timings.get(Timing.REQUEST_GENERATION_TOKENS)
        if prompt is not None and output is not None and prompt.mean is not None and output.mean is not None:
            return RequestSize(prompt.mean, output.mean, source)
    if running and used:
        return RequestSize(used / running, 0.0, "held by each running request now")
    return None


def _headroom(used: float | None, capacity: int | None, size: RequestSize | None) -> int | None:
    """How many more requests of the observed size fit into what is free now."""
    if used is None or capacity is None or size is None or size.tokens <= 0:
        return None
    return max(0, int((capacity - used) / size.tokens))


def _time_to_full(usage: tuple[float, ...], duration_s: float | None) -> float | None:
    """Seconds until the cache is full at the window's growth; None where it does not grow."""
    if duration_s is None or len(usage) < 2:
        return None
    growth = usage[-1] - usage[0]
    return (_FULL_AT - usage[-1]) / (growth / duration_s) if growth >= _GROWTH_SEEN else None
