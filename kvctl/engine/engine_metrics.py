"""What counts as what: turns steps and the ends of requests into the series of `metrics.definitions`.

Knows no streams, no text and no HTTP; `recorder` decides where values go. All series are looked up once, so that a
step over many requests costs additions only. Floor 2, imports no torch.

Invariants: accepted requests = ended ones (by reason) + those still here; prefix-cache hits never hold tokens that
were recomputed after a preemption (the scheduler counts first admissions only).
"""

from kvctl import __version__
from kvctl.core.request import FinishReason
from kvctl.core.step import SchedulerStats
from kvctl.engine.config import EngineInfo
from kvctl.metrics.recorder import CounterSeries, GaugeSeries, HistogramSeries, Recorder
from kvctl.metrics.timeline import RequestTimeline


class EngineMetrics:
    """Bound series of one engine. `info` may come later (`engine_started`)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        counter, gauge, histogram = recorder.counter, recorder.gauge, recorder.histogram
        self._kv_cache_bytes = 0
        self._running = gauge("vllm:num_requests_running")
        self._waiting = gauge("vllm:num_requests_waiting")
        self._waiting_capacity = gauge("vllm:num_requests_waiting_by_reason", reason="capacity")
        self._waiting_reasons: dict[str, GaugeSeries] = {}
        self._kv_usage = gauge("vllm:kv_cache_usage_perc")
        self._kv_used_bytes = gauge("kvctl:kv_cache_used_bytes")
        self._queries = counter("vllm:prefix_cache_queries")
        self._hits = counter("vllm:prefix_cache_hits")
        self._miss_reasons: dict[str, CounterSeries] = {}
        self._preemptions = counter("vllm:num_preemptions")
        self._recomputed = counter("kvctl:recomputed_tokens")
        self._prefill_tokens = counter("kvctl:scheduled_tokens", phase="prefill")
        self._decode_tokens = counter("kvctl:scheduled_tokens", phase="decode")
        self._iteration_tokens = histogram("vllm:iteration_tokens_total")
        self._step_duration = histogram("kvctl:step_duration_seconds")
        self._schedule_duration = histogram("kvctl:schedule_duration_seconds")
        self._accepted = counter("kvctl:requests_accepted")
        self._ended = {reason: counter("vllm:request_success", finished_reason=reason.value) for reason in FinishReason}
        self._prompt_tokens = counter("vllm:prompt_tokens")
        self._prompt_computed = counter("vllm:prompt_tokens_by_source", source="local_compute")
        self._prompt_hit = counter("vllm:prompt_tokens_by_source", source="local_cache_hit")
        self._prompt_cached = counter("vllm:prompt_tokens_cached")
        self._prompt_cached_device = counter("vllm:prompt_tokens_cached_by_source", source="device")
        self._generation_tokens = counter("vllm:generation_tokens")
        self._ttft = histogram("vllm:time_to_first_token_seconds")
        self._itl = histogram("vllm:inter_token_latency_seconds")
        self._request_prompt = histogram("vllm:request_prompt_tokens")
        self._request_generation = histogram("vllm:request_generation_tokens")
        self._request_longest = histogram("vllm:request_max_num_generation_tokens")
        self._request_max_tokens = histogram("vllm:request_params_max_tokens")
        self._request_computed = histogram("vllm:request_prefill_kv_computed_tokens")
        self._request_n = histogram("vllm:request_params_n")
        self._request_preemptions = histogram("vllm:request_num_preemptions")
        self._tpot = histogram("vllm:request_time_per_output_token_seconds")
        self._spans: tuple[tuple[str, HistogramSeries], ...] = (
            ("e2e_s", histogram("vllm:e2e_request_latency_seconds")),
            ("queue_s", histogram("vllm:request_queue_time_seconds")),
            ("prefill_s", histogram("vllm:request_prefill_time_seconds")),
            ("decode_s", histogram("vllm:request_decode_time_seconds")),
            ("inference_s", histogram("vllm:request_inference_time_seconds")),
        )

    def engine_started(self, info: EngineInfo) -> None:
        """Expose what building the engine found out."""
        gauge = self._recorder.gauge
        self._kv_cache_bytes = info.kv_cache_bytes
        gauge("kvctl:kv_cache_bytes").set(info.kv_cache_bytes)
        gauge("kvctl:kv_cache_size_tokens").set(info.kv_tokens)
        gauge("kvctl:weight_bytes").set(info.weight_bytes)
        gauge("kvctl:max_num_seqs").set(info.max_num_seqs)
        gauge("kvctl:max_num_batched_tokens").set(info.max_num_batched_tokens)
        gauge("kvctl:max_model_len").set(info.max_model_len)
        gauge(
            "vllm:cache_config_info",
            block_size=str(info.block_size),
            num_gpu_blocks=str(info.num_blocks),
            cache_dtype=info.kv_cache_dtype,
            enable_prefix_caching=str(info.enable_prefix_caching),
            kv_cache_size_tokens=str(info.kv_tokens),
            kv_cache_max_concurrency=f"{info.max_concurrency:.6g}",
            kv_cache_memory_bytes=str(info.kv_cache_bytes),
        ).set(1)
        gauge(
            "kvctl:backend_info",
            version=__version__,
            architecture=info.architecture,
            device=info.device,
            dtype=info.dtype,
            attention_backend=info.attention_backend,
            linear_backend=info.linear_backend,
            num_threads=str(info.num_threads),
        ).set(1)

    def step_done(self, stats: SchedulerStats, num_generated_tokens: int) -> None:
        """Count one step."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_capacity.set(stats.num_waiting)
        if stats.waiting_by_reason or self._waiting_reasons:
            self._set_waiting_reasons(stats.waiting_by_reason)
        usage = stats.kv_cache_usage
        self._kv_usage.set(usage)
        self._kv_used_bytes.set(round(usage * self._kv_cache_bytes))
        if stats.prefix_cache_queries:
            self._queries.inc(stats.prefix_cache_queries)
            self._hits.inc(stats.prefix_cache_hits)
            for reason, tokens in stats.prefix_miss_reasons.items():
                self._miss_counter(reason).inc(tokens)
        self._preemptions.inc(stats.num_preemptions)
        self._recomputed.inc(stats.num_recomputed_tokens)
        self._generation_tokens.inc(num_generated_tokens)
        if stats.num_scheduled_tokens:  # a step that only tells the state computed nothing
            self._prefill_tokens.inc(stats.num_prefill_tokens)
            self._decode_tokens.inc(max(0, stats.num_scheduled_tokens - stats.num_prefill_tokens))
            self._iteration_tokens.observe(stats.num_scheduled_tokens)
            self._schedule_duration.observe(stats.schedule_duration_s)
        if stats.step_duration_s:  # with overlapped steps it is an earlier one's
            self._step_duration.observe(stats.step_duration_s)

    def request_accepted(self) -> None:
        """Count one request (one child of n) given to the engine."""
        self._accepted.inc()

    def first_token(self, num_prompt_tokens: int, num_cached_tokens: int, ttft_s: float) -> None:
        """Count a request whose prompt is done."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_computed.inc(num_prompt_tokens - num_cached_tokens)
        self._prompt_hit.inc(num_cached_tokens)
        self._prompt_cached.inc(num_cached_tokens)
        self._prompt_cached_device.inc(num_cached_tokens)
        self._ttft.observe(ttft_s)

    def inter_token_latency(self, gap_s: float) -> None:
        """Count the gap before a delivery that was not a request's first."""
        self._itl.observe(gap_s)

    def request_ended(
        self,
        reason: FinishReason,
        timeline: RequestTimeline,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_preemptions: int | None,
        max_tokens: int,
    ) -> None:
        """Count the end of one request (one child of n). Spans that never happened are not counted.

        Args:
            num_preemptions: None where the engine was not asked (a stop string or an abort ended it).
        """
        self._ended[reason].inc()
        self._request_prompt.observe(num_prompt_tokens)
        self._request_generation.observe(timeline.num_output_tokens)
        self._request_max_tokens.observe(max_tokens)
        if timeline.num_output_tokens:
            self._request_computed.observe(num_prompt_tokens - num_cached_tokens)
        if num_preemptions is not None:
            self._request_preemptions.observe(num_preemptions)
        for name, series in self._spans:
            span_s: float | None = getattr(timeline, name)
            if span_s is not None:
                series.observe(span_s)
        tpot_s = timeline.tpot_s
        if tpot_s is not None:
            self._tpot.observe(tpot_s)

    def all_children_ended(self, n: int, longest_tokens: int) -> None:
        """Count the end of a whole request with its `n` children."""
        self._request_n.observe(n)
        self._request_longest.observe(longest_tokens)

    def engine_died(self) -> None:
        """Nothing runs or waits any more."""
        for gauge in (self._running, self._waiting, self._waiting_capacity, self._kv_usage, self._kv_used_bytes):
            gauge.set(0)
        self._set_waiting_reasons({})

    def _set_waiting_reasons(self, by_reason: dict[str, int]) -> None:
        known = self._waiting_reasons
        for reason, number in by_reason.items():
            if reason not in known:
                known[reason] = self._recorder.gauge("kvctl:num_requests_waiting_by_reason", reason=reason)
            known[reason].set(number)
        for reason, gauge in known.items():
            if reason not in by_reason:
                gauge.set(0)

    def _miss_counter(self, reason: str) -> CounterSeries:
        if reason not in self._miss_reasons:
            self._miss_reasons[reason] = self._recorder.counter("kvctl:prefix_cache_miss_tokens", reason=reason)
        return self._miss_reasons[reason]
