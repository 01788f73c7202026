"""What the server said of itself, joined with the run: which limit bound, when, and how warm the cache was."""

import pytest

from kvctl.bench.server_monitor import MonitorConfig, Reading, ServerMonitor
from kvctl.bench.server_report import build_server_report, limits
from kvctl.metrics.histogram import Histogram
from kvctl.metrics.server_names import Counter, Gauge, Server


def reading(time_s, *, running=8, waiting=0, kv=0.5, preemptions=0, hits=0, queries=0, steps=None, **gauges):
    values = {Gauge.RUNNING: running, Gauge.WAITING: waiting, Gauge.KV_USAGE: kv} | gauges.pop("more", {})
    counters = {Counter.PREEMPTIONS: preemptions, Counter.PREFIX_HITS: hits, Counter.PREFIX_QUERIES: queries}
    return Reading(time_s, values, counters, steps)


def names(readings):
    return [name for *_, name in limits(readings, 0.0, 100.0)]


def test_a_full_cache_with_requests_waiting_is_the_cache():
    assert names([reading(0), reading(1, waiting=3, kv=0.99), reading(2, waiting=3, kv=0.99)]) == ["load", "kv_blocks"]


def test_a_preemption_is_the_cache_even_between_two_quiet_readings():
    assert names([reading(0, preemptions=4), reading(1, preemptions=5)]) == ["kv_blocks"]


def test_running_flat_at_its_most_with_room_in_the_cache_is_max_num_seqs():
    assert names([reading(0, waiting=5), reading(1, waiting=5)]) == ["max_num_seqs"]
    capped = {"more": {Gauge.MAX_NUM_SEQS: 8}}
    assert names([reading(0, running=7, waiting=5, **capped), reading(1, waiting=5, **capped)]) == ["max_num_seqs"]
    rising = [reading(0, running=4, waiting=5), reading(1, running=6, waiting=5), reading(2, running=8, waiting=0)]
    assert names(rising) == ["waiting", "load"]


def test_steps_full_of_tokens_are_the_token_budget():
    def steps(total, count):
        return Histogram((100.0, float("inf")), (0.0, count), total, count)

    more = {"more": {Gauge.MAX_NUM_BATCHED_TOKENS: 2048}}
    readings = [reading(0, steps=steps(0, 0), **more), reading(1, waiting=2, steps=steps(20_000, 10), **more)]
    assert names(readings) == ["token_budget"]


def test_shares_and_moments_of_limits_are_told_the_longest_first():
    readings = [reading(i, waiting=4 if i >= 3 else 0, kv=1.0 if i >= 3 else 0.2) for i in range(10)]
    report = build_server_report(readings, Server.VLLM, 0.0, 9.0, 9.0)
    first = report["limits"][0]
    assert (first["limit"], first["share"], first["first_s"]) == ("kv_blocks", pytest.approx(6 / 9, abs=1e-4), 3.0)
    assert report["waiting_max"] == 4
    assert report["timeline"]["kv_usage"] == [0.2] * 3 + [1.0] * 7


def test_a_warm_cache_never_passes_unnoticed():
    readings = [reading(0, hits=100, queries=1000), reading(5, hits=700, queries=2000)]
    report = build_server_report(readings, Server.VLLM, 0.0, 5.0, 5.0)
    assert report["prefix_hit_rate"] == 0.6
    assert "60%" in report["warning"]
    cold = build_server_report([reading(0, queries=10), reading(5, queries=2000)], Server.VLLM, 0.0, 5.0, 5.0)
    assert "warning" not in cold


def test_a_restart_of_the_server_is_no_negative_count():
    readings = [reading(0, preemptions=50), reading(5, preemptions=2)]
    assert build_server_report(readings, Server.VLLM, 0.0, 5.0, 5.0)["preemptions"] == 2


def test_nothing_read_is_no_report():
    assert build_server_report([], Server.VLLM, 0, 1, 1) is None
    assert build_server_report([reading(0)], Server.UNKNOWN, 0, 1, 1) is None
    assert build_server_report([reading(0)], None, 0, 1, 1) is None


def test_a_real_page_is_read_in_another_process(mock_server):
    monitor = ServerMonitor(MonitorConfig(f"{mock_server(slots=4)}/metrics", {}, 0.25))
    assert monitor.is_available
    readings, server = monitor.stop()
    assert server is Server.VLLM
    assert len(readings) >= 2
    assert readings[0].gauges[Gauge.RUNNING] == 0
    assert readings[0].time_s < readings[-1].time_s


@pytest.mark.parametrize("path", ["/nothing", "/v1/models"])
def test_a_server_without_metrics_is_no_failure(mock_server, path):
    monitor = ServerMonitor(MonitorConfig(mock_server() + path, {}, 1.0))
    assert not monitor.is_available
    assert monitor.stop() == ([], None)
