"""Increments over a window: restarts, missing series, and which readings a window takes."""

import pytest

from kvctl.metrics.server_names import Counter, Timing
from kvctl.top.window import current_regime, measure, readings_within
from tests.top.series import gauges, histogram, read


def page(tokens, start_s=None, running=1, waiting=0):
    started = "" if start_s is None else f"process_start_time_seconds {start_s}\n"
    return gauges(running, waiting) + f"vllm:generation_tokens_total {tokens}\n" + started


def readings(*values, **more):
    return [read(page(value, **more), float(index)) for index, value in enumerate(values)]


def test_a_rate_is_the_increase_over_the_time_between_the_readings():
    window = measure(readings(100, 150, 300))
    assert window.duration_s == 2.0
    assert window.counters[Counter.GENERATION_TOKENS] == 200
    assert window.rate(Counter.GENERATION_TOKENS) == 100.0
    assert window.rate(Counter.PREEMPTIONS) is None  # not on the page: missing, not 0


@pytest.mark.parametrize(
    ("values", "increase", "restarts"),
    [
        ((100, 150, 20, 50), 50 + 20 + 30, 1),  # Prometheus' increase: the value after a reset counts whole
        ((100, 10), 10, 1),
        ((100, 150, 10), 60, 1),
        ((100, 10, 5, 6), 10 + 5 + 1, 2),
        ((0, 0, 0), 0, 0),
    ],
)
def test_a_counter_that_falls_is_a_restart_and_counts_from_zero(values, increase, restarts):
    window = measure(readings(*values))
    assert window.counters[Counter.GENERATION_TOKENS] == increase
    assert window.num_restarts == restarts


def test_a_new_process_is_a_restart_even_where_the_counter_is_already_higher():
    window = measure([read(page(10, 1000.0), 0.0), read(page(500, 2000.0), 1.0)])
    assert window.num_restarts == 1
    assert window.counters[Counter.GENERATION_TOKENS] == 500


def test_histograms_follow_the_same_restarts():
    name = "vllm:time_to_first_token_seconds"
    pages = [
        page(100) + histogram(name, (1.0,), (5, 0), 2.0),
        page(10) + histogram(name, (1.0,), (1, 1), 3.0),
        page(20) + histogram(name, (1.0,), (2, 1), 3.5),
    ]
    window = measure([read(text, float(i)) for i, text in enumerate(pages)])
    assert window.timings[Timing.TTFT].count == 3
    assert window.timings[Timing.TTFT].sum == 3.5


def test_one_reading_or_none_is_no_window():
    assert measure(readings(1)) is None
    assert measure([]) is None


def test_a_window_takes_the_newest_readings_that_span_it():
    many = readings(*range(30))
    assert readings_within(many, 5.0)[0].at_s == 24.0
    assert len(readings_within(many, 0.5)) == 2
    assert readings_within(many[:1], 5.0) == many[:1]


def queue(*waiting):
    return [read(gauges(4, number), float(index)) for index, number in enumerate(waiting)]


def test_a_verdict_looks_only_at_the_part_with_a_queue():
    assert [r.at_s for r in current_regime(queue(0, 0, 0, 5, 6, 7))] == [3.0, 4.0, 5.0]
    assert len(current_regime(queue(0, 0, 0, 0, 6, 7))) == 6  # two readings do not make a queue yet
    assert len(current_regime(queue(0, 3, 0, 3, 0, 3))) == 6  # it flickers: all of it
    assert [r.at_s for r in current_regime(queue(9, 9, 0, 0, 0))] == [2.0, 3.0, 4.0]


def test_a_quiet_beginning_is_left_out_but_for_its_last_reading():
    quiet_then_busy = [read(gauges(running, 0), float(i)) for i, running in enumerate((0, 0, 0, 2, 2, 2))]
    assert [r.at_s for r in current_regime(quiet_then_busy)] == [2.0, 3.0, 4.0, 5.0]
