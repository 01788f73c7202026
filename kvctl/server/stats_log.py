"""The periodic line about the engine, in vLLM's wording, because people's scripts read it.

Knows the recorder's series, no engine and no clock of its own. Says nothing while nothing happens. Floor 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvctl.metrics.recorder import CounterSeries, Recorder

INTERVAL_S: Final = 10.0


@dataclass(slots=True)
class _Rate:
    """How much a counter grew since it was last asked."""

    series: CounterSeries
    last: float = 0.0

    def grown(self) -> float:
        value = self.series.value
        grown, self.last = value - self.last, value
        return grown


class StatsLog:
    """Builds one line per interval from the counters' growth."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float], *, cache_name: str = "KV cache") -> None:
        self._clock = clock
        self._last_s = clock()
        self._cache_name = cache_name
        self._prompt = _Rate(recorder.counter("vllm:prompt_tokens_by_source", source="local_compute"))
        self._generation = _Rate(recorder.counter("vllm:generation_tokens"))
        self._queries = _Rate(recorder.counter("vllm:prefix_cache_queries"))
        self._hits = _Rate(recorder.counter("vllm:prefix_cache_hits"))
        self._preemptions = _Rate(recorder.counter("vllm:num_preemptions"))
        self._running = recorder.gauge("vllm:num_requests_running")
        self._waiting = recorder.gauge("vllm:num_requests_waiting")
        self._usage = recorder.gauge("vllm:kv_cache_usage_perc")
        self._hit_rate: float | None = None
        self._was_idle = True

    def line(self) -> str | None:
        """The line for the time since the last call; None when idle now and idle before."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._last_s, 1e-9)
        self._last_s = now_s
        prompt, generated = self._prompt.grown(), self._generation.grown()
        queries, hits, preemptions = self._queries.grown(), self._hits.grown(), self._preemptions.grown()
        if queries:
            self._hit_rate = hits / queries
        is_idle = not (prompt or generated or self._running.value or self._waiting.value)
        was_idle, self._was_idle = self._was_idle, is_idle
        if is_idle and was_idle:
            return None
        line = (
            f"Engine 000: Avg prompt throughput: {prompt / elapsed_s:.1f} tokens/s, "
            f"Avg generation throughput: {generated / elapsed_s:.1f} tokens/s, "
            f"Running: {self._running.value:.0f} reqs, Waiting: {self._waiting.value:.0f} reqs"
        )
        if preemptions:
            line += f", Preemptions: {preemptions:.0f}"
        line += f", {self._cache_name} usage: {100 * self._usage.value:.1f}%"
        if self._hit_rate is not None:
            line += f", Prefix cache hit rate: {100 * self._hit_rate:.1f}%"
        return line
