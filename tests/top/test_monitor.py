"""The monitor: stale pages, restarts, engines that come and go, and what it keeps."""

import pytest

from kvctl.metrics.exposition import parse_page
from kvctl.top.demo import DemoLoad, DemoServer
from kvctl.top.merge import merge_readings
from kvctl.top.monitor import MAX_POINTS, MAX_READINGS, Monitor, worst_limit
from kvctl.top.reading import read_engines
from kvctl.top.scrape import Scrape
from kvctl.top.to_json import fleet_to_json
from kvctl.top.verdict import Limit
from tests.top.series import START_S, URL, Watched, gauges, histogram, read


def monitor(*pages, step_s=1.0):
    found = Monitor({URL: "server:8000"}, step_s)
    for index, page in enumerate(pages):
        text, error = (page, None) if page is not None else (None, "connection refused")
        found.add(Scrape(URL, START_S + index * step_s, text, error))
    return found


def only(found, now_s, **options):
    (view,) = found.view(now_s, 15.0, **options).engines
    return view


def test_an_endpoint_that_never_answered_is_there_with_its_error():
    view = only(monitor(None), START_S)
    assert view.snapshot is None
    assert view.error == "connection refused"
    assert view.is_stale
    assert view.age_s is None
    assert view.verdict.limit is Limit.UNKNOWN
    assert view.verdict.finding.summary == "No page could be read: connection refused."


def test_the_json_of_an_endpoint_that_never_answered_has_every_field():
    alive, dead = (
        fleet_to_json(monitor(*pages).view(START_S + 1, 15.0))["engines"][0]
        for pages in ((gauges(3, 0), gauges(4, 0)), (None, None))
    )
    assert list(dead) == list(alive)
    assert dead["running"] is None and dead["ttft_s"] is None


def test_an_endpoint_that_stops_answering_keeps_its_numbers_and_ages():
    view = only(monitor(gauges(3, 0), gauges(4, 0), None), START_S + 9)
    assert view.snapshot.running == 4
    assert view.is_stale
    assert view.age_s == 8


def test_without_any_answer_at_all_a_page_gets_stale_too():
    found = monitor(gauges(3, 0), gauges(4, 0))
    assert not only(found, START_S + 2).is_stale
    assert only(found, START_S + 30).is_stale


def test_a_server_that_comes_back_is_fresh_and_its_restart_is_seen():
    counted = "vllm:generation_tokens_total {}\n"
    pages = [gauges(3, 0) + counted.format(n) for n in (1000, 1100)]
    view = only(monitor(*pages, None, gauges(1, 0) + counted.format(30)), START_S + 3)
    assert not view.is_stale
    assert view.snapshot.num_restarts == 1
    assert view.snapshot.generation_tokens_per_s == pytest.approx((100 + 30) / 3)


def test_a_page_of_something_else_says_so():
    view = only(monitor("node_load1 1\n", "node_load1 2\n"), START_S + 1)
    assert "no names of an inference server" in view.error
    assert "no names of an inference server" in view.verdict.finding.summary


def dp(*running):
    return "".join(f'vllm:num_requests_running{{engine="{i}"}} {n}\nvllm:num_requests_waiting{{engine="{i}"}} 0\n'
                   for i, n in enumerate(running))  # fmt: skip


def test_engines_are_rows_of_their_own_and_one_row_on_request():
    found = monitor(dp(3, 5), dp(4, 6))
    apart = found.view(START_S + 1, 15.0).engines
    assert [view.snapshot.running for view in apart] == [4, 6]
    together = only(found, START_S + 1, summed=True)
    assert (together.snapshot.engine, together.snapshot.running) == ("all", 10)


def test_an_engine_that_is_gone_from_the_page_is_gone_from_the_table():
    assert only(monitor(dp(3, 5), dp(4, 6), dp(4)), START_S + 2).snapshot.engine == "0"


def test_merged_engines_add_what_adds_up_and_average_what_does_not():
    def engine(number, usage, blocks, tokens):
        label = f'engine="{number}"'
        return (
            f"vllm:kv_cache_usage_perc{{{label}}} {usage}\n"
            f'vllm:cache_config_info{{{label},block_size="16",num_gpu_blocks="{blocks}"}} 1\n'
            f"vllm:generation_tokens_total{{{label}}} {tokens}\n"
        )

    readings = [read(engine(0, 0.5, 100, 10)), read(engine(1, 1.0, 300, 30))]
    merged = merge_readings(readings)
    assert merged.gauges["kv_usage"] == pytest.approx((0.5 * 1600 + 1.0 * 4800) / 6400)
    assert merged.settings.capacity_tokens == 6400
    assert merged.counters["generation_tokens"] == 40


def test_a_sum_over_engines_of_which_one_says_nothing_is_not_made():
    merged = merge_readings([read(gauges(3, 1)), read("vllm:num_requests_running 2\n")])
    assert merged.gauges["running"] == 5
    assert "waiting" not in merged.gauges


def test_histograms_of_other_bounds_are_left_out_of_the_sum():
    one = read(gauges(1, 0) + histogram("vllm:time_to_first_token_seconds", (1.0,), (1, 0), 1.0))
    other = read(gauges(1, 0) + histogram("vllm:time_to_first_token_seconds", (2.0,), (1, 0), 1.0))
    assert merge_readings([one, one]).timings["ttft"].count == 2
    assert "ttft" not in merge_readings([one, other]).timings


def test_an_hour_weighs_what_some_minutes_do():
    found = Monitor({URL: "s"}, 0.1)
    for index in range(MAX_POINTS + 200):
        found.add(Scrape(URL, START_S + index * 0.1, gauges(1, 0), None))
    (track,) = found._tracks[URL]._engines.values()
    assert len(track.points) == MAX_POINTS
    assert len(track.readings) <= MAX_READINGS
    assert track.readings[0].at_s >= track.readings[-1].at_s - 66.1


def test_scrapes_that_come_late_or_twice_change_nothing():
    found = monitor(gauges(1, 0), gauges(2, 0))
    found.add(Scrape(URL, START_S, gauges(9, 9), None))
    assert only(found, START_S + 1).snapshot.running == 2


def test_the_fleets_verdict_is_the_worst():
    busy = Watched(DemoServer(max_num_seqs=4))
    busy.run(12, DemoLoad(users=20))
    other = "http://other:1/metrics"
    for index in range(3):
        busy.monitor.add(Scrape(other, busy.now_s - 2 + index, gauges(0, 0) + "vllm:generation_tokens_total 5\n", None))
    fleet = busy.monitor.view(busy.now_s, 15.0)
    assert [view.label for view in fleet.engines] == ["server:8000", "other:1"]
    assert worst_limit(fleet) is Limit.MAX_NUM_SEQS


def test_a_page_with_endless_reasons_buckets_and_engines_is_not_kept_whole():
    reasons = "".join(
        f'kvctl:num_requests_waiting_by_reason{{engine="0",reason="r{i}"}} 1\n'
        f'kvctl:prefix_cache_miss_tokens_total{{engine="0",reason="r{i}"}} 1\n'
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="{i}"}} {i}\n'
        for i in range(5000)
    )
    counts = 'vllm:time_to_first_token_seconds_count{engine="0"} 5000\n'
    engines = "".join(f'vllm:num_requests_running{{engine="{i}"}} 1\n' for i in range(3000))
    readings = read_engines(parse_page(engines + reasons + counts), 0.0)
    assert len(readings) == 256
    first = next(reading for reading in readings if reading.engine == "0")
    assert len(first.waiting_reasons) == len(first.miss_reasons) == 32
    assert first.timings == {}
