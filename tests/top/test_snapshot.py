"""Snapshots: the two recorded vLLM scrapes against figures worked out from their text, and the missing as missing."""

import math
from pathlib import Path

import pytest

from kvctl.metrics.exposition import parse_page
from kvctl.metrics.server_names import Server
from kvctl.top.diagnose import diagnose
from kvctl.top.reading import read_engines
from kvctl.top.snapshot import take_snapshot
from kvctl.top.verdict import Limit
from tests.top.series import gauges, histogram, snapshot_of

DATA = Path(__file__).parents[1] / "data" / "top"
APART_S = 5.02


@pytest.fixture(scope="module")
def under_load():
    pages = [(DATA / f"vllm_under_load_{number}.txt").read_text() for number in (1, 2)]
    return take_snapshot([read_engines(parse_page(page), i * APART_S)[0] for i, page in enumerate(pages)])


def test_the_recorded_vllm_scrapes_give_the_figures_in_their_text(under_load):
    now = under_load
    assert (now.server, now.model, now.engine) == (Server.VLLM, "m", "0")
    assert (now.running, now.waiting) == (64, 0)
    assert now.trace.waiting == (47, 0)
    assert now.kv_capacity_tokens == 93_184
    assert now.kv_cache_bytes == 2 << 30
    assert now.kv_usage == pytest.approx(0.176066)
    assert now.kv_used_tokens == pytest.approx(0.176066 * 93_184, rel=1e-4)
    assert now.generation_tokens_per_s == pytest.approx((104_353 - 100_881) / APART_S)
    assert now.prompt_tokens_per_s == pytest.approx((207_872 - 201_728) / APART_S)
    assert now.prefix_queries == 207_872 - 201_856
    assert now.prefix_hit_rate == 0.0
    assert now.prefix_hit_rate_before == pytest.approx(58_496 / 201_856)
    assert now.steps_per_s == pytest.approx(55 / APART_S)
    assert now.step_tokens.mean == pytest.approx((253_729 - 244_113) / 55)
    assert now.ttft_s.count == 48
    assert now.ttft_s.mean == pytest.approx((1708.919418334961 - 1617.2544322013855) / 48)
    assert (now.ttft_s.p50.low, now.ttft_s.p50.high) == (1.0, 2.5)  # 32 of the 48 lie there
    assert now.request_size.source == "finished since the start"  # none finished in between
    assert now.request_size.tokens == pytest.approx((199_680 + 100_864) / 788)
    assert now.headroom_requests == int(93_184 * (1 - 0.17606602475928468) / ((199_680 + 100_864) / 788))
    assert now.preemptions_per_s == 0.0
    assert now.cpu_cores == pytest.approx((23.83 - 23.61) / APART_S)


def test_without_observations_in_the_window_there_is_no_quantile_and_no_old_one_instead(under_load):
    assert under_load.queue_s is None
    assert under_load.e2e_s is None


def test_what_vllm_does_not_export_is_missing(under_load):
    assert under_load.max_num_seqs is None
    assert under_load.max_num_batched_tokens is None
    assert under_load.step_duration_s is None
    assert under_load.acceptance_rate is None


def test_a_queue_of_47_that_empties_within_the_window_is_not_a_limit(under_load):
    verdict = diagnose(under_load)
    assert verdict.limit is Limit.HEALTHY
    assert any("47 -> 0" in fact.text for fact in verdict.finding.evidence)


def test_a_nearly_empty_page_gives_none_everywhere_and_zero_nowhere():
    now = snapshot_of(gauges(1, 0), gauges(1, 0))
    numbers = [
        now.kv_usage,
        now.kv_used_tokens,
        now.headroom_requests,
        now.time_to_full_s,
        now.prefix_hit_rate,
        now.preemptions_per_s,
        now.generation_tokens_per_s,
        now.steps_per_s,
        now.ttft_s,
        now.cpu_cores,
        now.is_awake,
    ]
    assert numbers == [None] * len(numbers)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_value_that_is_no_number_is_missing(value):
    now = snapshot_of(f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 1\n")
    assert now.running is None
    assert now.waiting == 1


def test_the_time_to_full_is_what_is_left_over_the_growth():
    now = snapshot_of(gauges(1, 0, 0.5), gauges(1, 0, 0.6), gauges(1, 0, 0.7))
    assert now.time_to_full_s == pytest.approx(0.3 / 0.1)
    assert snapshot_of(gauges(1, 0, 0.7), gauges(1, 0, 0.6)).time_to_full_s is None


def test_the_held_tokens_stand_in_for_a_request_size_before_any_request_has_finished():
    info = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    now = snapshot_of(gauges(4, 0, 0.5) + info)
    assert now.kv_capacity_tokens == 1600
    assert now.request_size.tokens == 200
    assert now.request_size.source == "held by each running request now"
    assert now.headroom_requests == 4


def test_bucket_bounds_are_read_and_not_assumed():
    name = "vllm:time_to_first_token_seconds"
    pages = [
        gauges(1, 0) + histogram(name, (0.123, 7.77), (0, 0, 0), 0.0),
        gauges(1, 0) + histogram(name, (0.123, 7.77), (0, 3, 1), 9.0),
    ]
    spread = snapshot_of(*pages).ttft_s
    assert (spread.p50.low, spread.p50.high) == (0.123, 7.77)
    assert (spread.p99.low, spread.p99.high) == (7.77, math.inf)


def test_speculative_decoding_is_accepted_over_drafted():
    def page(drafts, drafted, accepted):
        return gauges(1, 0) + (
            f"vllm:spec_decode_num_drafts_total {drafts}\nvllm:spec_decode_num_draft_tokens_total {drafted}\n"
            f"vllm:spec_decode_num_accepted_tokens_total {accepted}\n"
        )

    now = snapshot_of(page(0, 0, 0), page(100, 300, 150))
    assert now.acceptance_rate == 0.5
    assert now.accept_length == 2.5
