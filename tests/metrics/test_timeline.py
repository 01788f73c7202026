import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.metrics.timeline import RequestTimeline, inter_token_latencies_s


def test_spans_are_those_of_the_picture():
    timeline = RequestTimeline(
        arrival_s=100.0, admitted_s=100.5, first_token_s=102.0, last_token_s=106.0, num_output_tokens=9
    )
    assert timeline.ttft_s == 2.0
    assert timeline.queue_s == 0.5
    assert timeline.prefill_s == 1.5
    assert timeline.decode_s == 4.0
    assert timeline.inference_s == 5.5
    assert timeline.e2e_s == 6.0
    assert timeline.tpot_s == 0.5  # 4 s over the 8 tokens after the first


def test_what_did_not_happen_is_none_and_not_zero():
    waiting = RequestTimeline(arrival_s=5.0)
    spans = [
        *(waiting.ttft_s, waiting.e2e_s, waiting.queue_s, waiting.prefill_s),
        *(waiting.decode_s, waiting.inference_s, waiting.tpot_s),
    ]
    assert spans == [None] * 7
    seen_by_a_client = RequestTimeline(arrival_s=5.0, first_token_s=6.0, last_token_s=6.0, num_output_tokens=1)
    assert seen_by_a_client.ttft_s == seen_by_a_client.e2e_s == 1.0
    assert seen_by_a_client.queue_s is None
    assert seen_by_a_client.tpot_s is None


def test_tokens_that_came_with_the_first_delivery_are_not_waited_for():
    timeline = RequestTimeline(0.0, None, 1.0, 4.0, num_output_tokens=7, num_first_tokens=4)
    assert timeline.tpot_s == 1.0
    assert RequestTimeline(0.0, None, 1.0, 1.0, num_output_tokens=4, num_first_tokens=4).tpot_s is None


def test_two_clock_reads_in_the_wrong_order_are_no_negative_time():
    assert RequestTimeline(arrival_s=1.0, admitted_s=1.0 - 1e-9).queue_s == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50).map(sorted))
def test_mean_gap_is_the_time_per_output_token(times_s):
    timeline = RequestTimeline(0.0, None, times_s[0], times_s[-1], num_output_tokens=len(times_s))
    gaps_s = inter_token_latencies_s(times_s)
    assert gaps_s == numpy.diff(times_s).tolist()
    assert timeline.tpot_s == pytest.approx(numpy.mean(gaps_s), abs=1e-6)


def test_fewer_than_two_deliveries_have_no_gap():
    assert inter_token_latencies_s([]) == inter_token_latencies_s([3.0]) == []
