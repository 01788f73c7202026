"""Sweeps and searches on a pretended server whose limits are known."""

import pytest

from kvctl.bench.run_config import LoadConfig
from kvctl.bench.search import Sweep, ended_at_client, find_knee, find_max_rate, found_text, load_at, run_sweep
from kvctl.errors import ConfigError


def result(share=1.0, throughput=100.0, verdict="valid", never_sent=0):
    return {
        "summary": {"goodput": {"share": share}, "steady": None, "output_throughput": throughput},
        "client": {"verdict": verdict, "never_sent": never_sent},
        "stopped_by_errors": False,
    }


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.7, 100.0, 900.0])
def test_the_highest_rate_that_holds_is_found_to_five_percent(limit):
    points, found = find_max_rate(lambda rate: [result(1.0 if rate <= limit else 0.2)], slo_share=0.95, start=1.0)
    assert limit / 1.06 <= found <= limit * 1.001
    assert [point["value"] for point in points] == sorted(point["value"] for point in points)
    assert len(points) < 25


def test_a_server_that_never_holds_is_told_as_none():
    points, found = find_max_rate(lambda rate: [result(0.0)], slo_share=0.95, start=1.0)
    assert found is None
    assert points


@pytest.mark.parametrize("bad", [{"verdict": "client_limited"}, {"never_sent": 1}, {"share": None}])
def test_a_point_that_says_nothing_of_the_server_does_not_hold(bad):
    _, found = find_max_rate(lambda rate: [result(**(bad if rate > 4 else {}))], slo_share=0.95, start=1.0)
    assert 3.5 < found <= 4


def test_a_search_that_ends_at_the_client_says_so_and_tries_a_doubtful_point_twice():
    asked = []

    def run_at(rate):
        asked.append(rate)
        return [result(verdict="valid" if rate <= 4 or (asked.count(rate) > 1 and rate < 6) else "client_limited")]

    points, found = find_max_rate(run_at, slo_share=0.95, start=1.0)
    assert 5.5 < found < 6
    assert ended_at_client(points, found)
    points, found = find_max_rate(lambda rate: [result(1.0 if rate <= 4 else 0.0)], slo_share=0.95, start=1.0)
    assert not ended_at_client(points, found)


def test_all_repeats_must_hold():
    def run_at(rate):
        return [result(1.0), result(1.0 if rate <= 2 else 0.5)]

    _, found = find_max_rate(run_at, slo_share=0.95, start=1.0)
    assert 1.9 < found <= 2.0


def test_the_knee_is_where_more_load_buys_only_waiting():
    def run_at(concurrency):
        return [result(throughput=10.0 * min(concurrency, 40))]

    points, knee = find_knee(run_at)
    assert 36 <= knee <= 40  # 90 % of the best is reached at 36
    assert max(point["value"] for point in points) <= 256


def test_a_server_that_answers_nothing_has_no_knee():
    assert find_knee(lambda concurrency: [result(throughput=0.0)])[1] is None


def test_a_sweep_runs_its_values_in_order():
    sweep = Sweep.parse("concurrency=1,4,2")
    assert [point["value"] for point in run_sweep(sweep, lambda value: [result()])] == [1, 4, 2]
    assert Sweep.parse("rate=0.5,2").parameter == "rate"


@pytest.mark.parametrize(
    "text",
    ["", "4", "concurrency", "concurrency=", "rate=0", "rate=-1", "rate=x", "concurrency=1.5", "x=1", "rate=nan"],
)
def test_a_wrong_sweep_is_refused(text):
    with pytest.raises(ConfigError):
        Sweep.parse(text)


def test_a_point_keeps_everything_but_the_load():
    load = LoadConfig(concurrency=3, duration_s=5.0, seed=9, process="gamma", burstiness=0.5)
    at = load_at(load, "rate", 2.0)
    assert (at.concurrency, at.duration_s, at.seed, at.arrivals.segments[0].start_per_s) == (None, 5.0, 9, 2.0)
    assert (at.arrivals.process, at.arrivals.burstiness) == ("gamma", 0.5)
    assert load_at(at, "concurrency", 8).concurrency == 8


def test_what_was_found_is_told_in_words_also_when_it_was_interrupted():
    search = {"parameter": "rate", "found": 2.0, "ended_at_client": True, "interrupted": False}
    assert found_text(search).startswith("found: rate 2; above it this client")
    assert found_text(search | {"found": None, "interrupted": True}) == "interrupted before anything was found"
    assert found_text(search | {"found": None}) == "found: none that holds"
