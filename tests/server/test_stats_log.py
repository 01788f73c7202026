from kvctl.metrics.recorder import InMemoryRecorder
from kvctl.server.stats_log import StatsLog
from tests.support.fakes import FakeClock


def test_the_line_has_vllms_wording_and_is_silent_when_idle_twice():
    clock, recorder = FakeClock(), InMemoryRecorder()
    stats = StatsLog(recorder, clock, cache_name="GPU KV cache")
    clock.advance(10)
    assert stats.line() is None
    recorder.counter("vllm:prompt_tokens_by_source", source="local_compute").inc(1000)
    recorder.counter("vllm:prompt_tokens_by_source", source="local_cache_hit").inc(5000)
    recorder.counter("vllm:generation_tokens").inc(123)
    recorder.gauge("vllm:num_requests_running").set(3)
    recorder.gauge("vllm:num_requests_waiting").set(2)
    recorder.gauge("vllm:kv_cache_usage_perc").set(0.256)
    recorder.counter("vllm:prefix_cache_queries").inc(6000)
    recorder.counter("vllm:prefix_cache_hits").inc(5000)
    clock.advance(10)
    assert stats.line() == (
        "Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 12.3 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 25.6%, Prefix cache hit rate: 83.3%"
    )
    recorder.counter("vllm:num_preemptions").inc(4)
    clock.advance(10)
    assert "Waiting: 2 reqs, Preemptions: 4, GPU KV cache usage" in (stats.line() or "")
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        recorder.gauge(name).set(0)
    assert stats.line() is not None and stats.line() is None
