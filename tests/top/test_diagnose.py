"""One series per limit, generated or by hand, and the verdict it must give, on kvctl's page and on vLLM's."""

import re

import pytest

from kvctl.metrics.server_names import Server
from kvctl.top.case import Point
from kvctl.top.demo import DemoLoad, DemoServer
from kvctl.top.diagnose import diagnose
from kvctl.top.verdict import EXPLAINED, TITLES, Limit
from tests.top.series import Watched, gauges, histogram, snapshot_of, verdict_of

BOTH = pytest.mark.parametrize("says_its_limits", [True, False], ids=["kvctl", "vllm"])
KV_LOAD = DemoLoad(users=40, prompt_tokens=500, output_tokens=400)
SEATS_LOAD = DemoLoad(users=30)
BUDGET_LOAD = DemoLoad(users=30, prompt_tokens=3000, output_tokens=10, think_s=0.1)
DOCUMENTS = DemoLoad(users=1, prompt_tokens=4000, documents=5, output_tokens=20, think_s=0.05)


def limits(views):
    return [view.verdict.limit for view in views]


def delay_s(views, limit):
    """Seconds until the verdict is this one and stays it."""
    wrong = [index for index, one in enumerate(limits(views)) if one is not limit]
    return (wrong[-1] + 1 if wrong else 0) + 1


def text_of(finding):
    parts = [finding.summary, *(e.text for e in finding.evidence), *(a.text for a in finding.advice)]
    return "\n".join([*parts, *(flag for advice in finding.advice for _, flag in advice.flags)])


@BOTH
def test_a_small_kv_cache_is_named_within_seconds_and_the_need_is_computed(says_its_limits):
    watched = Watched(DemoServer(kv_tokens=8000, exports_limits=says_its_limits))
    assert limits(watched.run(10))[-1] is Limit.IDLE
    views = watched.run(30, KV_LOAD)
    assert delay_s(views, Limit.KV_BLOCKS) <= 5
    finding = views[-1].verdict.finding
    assert finding.confidence >= 0.9
    assert finding.limit.binds
    text = text_of(finding)
    assert re.search(r"--kv-cache-memory-bytes 4\.\dGiB", text)  # 40 x about 900 tokens where 8,000 have 1000 MiB
    assert "preemptions" in text
    assert ("fp8 doubles 8,000 tokens to 16,000" in text) is not says_its_limits  # kvctl has no fp8 KV


def test_the_memory_that_is_advised_is_what_running_and_waiting_requests_need():
    sizes = histogram("vllm:request_prompt_tokens", (1000.0,), (10, 0), 3000.0)
    sizes += histogram("vllm:request_generation_tokens", (1000.0,), (10, 0), 1000.0)
    info = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",kv_cache_memory_bytes="104857600"} 1\n'
    pages = [gauges(4, 6, 0.98) + sizes + info + f"vllm:num_preemptions_total {n}\n" for n in range(4)]
    finding = verdict_of(*pages).finding
    assert finding.limit is Limit.KV_BLOCKS
    # 10 requests of 300 + 100 tokens need 4,000; 1,600 tokens take 100 MiB, so 250 MiB
    assert "10 requests of 400 tokens want 4,000 tokens of KV, 2.5 times the 1,600 there are" in text_of(finding)
    assert finding.advice[0].flag_for(Server.VLLM) == "--kv-cache-memory-bytes 250MiB"
    assert finding.advice[1].flag_for(Server.KVCTL) == "--max-num-seqs 4"  # 1,600 / 400


@BOTH
def test_full_seats_are_named_and_the_advice_is_what_the_kv_cache_holds(says_its_limits):
    watched = Watched(DemoServer(max_num_seqs=8, exports_limits=says_its_limits))
    watched.run(10)
    views = watched.run(20, SEATS_LOAD)
    assert delay_s(views, Limit.MAX_NUM_SEQS) <= 5
    finding = views[-1].verdict.finding
    text = text_of(finding)
    assert "--max-num-seqs 32" in text
    assert "KV headroom is" in text
    assert ("inferred: running stays at 8" in text) is not says_its_limits
    assert finding.confidence >= (0.95 if says_its_limits else 0.8)


@BOTH
def test_full_steps_of_long_prompts_are_prefill_bound(says_its_limits):
    watched = Watched(DemoServer(max_num_batched_tokens=128, exports_limits=says_its_limits))
    watched.run(10)
    views = watched.run(20, BUDGET_LOAD)
    assert delay_s(views, Limit.TOKEN_BUDGET) <= 5
    text = text_of(views[-1].verdict.finding)
    assert "--max-num-batched-tokens 1024" in text
    assert "a prompt of 3," in text
    assert ("max_num_batched_tokens is inferred" in text) is not says_its_limits


def test_a_cycle_larger_than_the_cache_is_thrash_and_the_server_says_why():
    watched = Watched(DemoServer(kv_tokens=16_000))
    watched.run(10)
    views = watched.run(20, DOCUMENTS)
    assert delay_s(views, Limit.PREFIX_THRASH) <= 6
    text = text_of(views[-1].verdict.finding)
    assert "had been evicted" in text
    assert "16,000 tokens do not hold what comes back; try 32,000" in text


def test_without_reasons_thrash_shows_as_a_hit_rate_that_falls_once_the_cache_has_turned_over():
    watched = Watched(DemoServer(kv_tokens=16_000, exports_limits=False))
    three = DemoLoad(users=1, prompt_tokens=4000, documents=3, output_tokens=20, think_s=0.05)
    assert limits(watched.run(20, three))[-1] is Limit.HEALTHY
    views = watched.run(20, DOCUMENTS)
    assert delay_s(views, Limit.PREFIX_THRASH) <= 12
    assert "were found earlier" in text_of(views[-1].verdict.finding)


def test_without_reasons_and_without_a_better_past_nobody_claims_thrash():
    watched = Watched(DemoServer(kv_tokens=16_000, exports_limits=False))
    finding = watched.run(20, DOCUMENTS)[-1].verdict.finding
    assert finding.limit is Limit.PREFIX_TOO_SHORT
    assert finding.confidence <= 0.5
    assert "may be gone" in text_of(finding)


def test_block_lifetimes_prove_thrash_where_vllm_exports_them():
    def page(queries, idle, reuse, written):
        return (
            gauges(1, 0, 0.3)
            + f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total 0\n"
            + f"vllm:prompt_tokens_total {written}\nvllm:generation_tokens_total {written}\n"
            + 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
            + histogram("vllm:kv_block_idle_before_evict_seconds", (1.0, 10.0), idle, sum(idle) * 0.5)
            + histogram("vllm:kv_block_reuse_gap_seconds", (1.0, 10.0), reuse, sum(reuse) * 5.0)
        )

    verdict = verdict_of(page(0, (0, 0, 0), (0, 0, 0), 5000), page(9000, (9, 0, 0), (0, 9, 0), 9000))
    assert verdict.limit is Limit.PREFIX_THRASH
    assert verdict.finding.confidence >= 0.8


@BOTH
def test_no_requests_is_idle_and_a_light_load_is_not(says_its_limits):
    watched = Watched(DemoServer(exports_limits=says_its_limits))
    assert set(limits(watched.run(5))[1:]) == {Limit.IDLE}
    documents = DemoLoad(users=4, documents=4)
    assert limits(watched.run(15, documents))[-1] is Limit.HEALTHY
    assert limits(watched.run(14, DemoLoad(users=0)))[-1] is Limit.IDLE


def test_a_queue_that_does_not_move_is_stuck_only_after_a_while():
    page = gauges(0, 5, 0.0) + "vllm:generation_tokens_total 100\n"
    early = verdict_of(page, page, step_s=1.0)
    assert early.limit is Limit.UNKNOWN
    assert "too short to call it stuck" in early.finding.summary
    late = verdict_of(page, page, page, step_s=3.0)
    assert late.limit is Limit.STUCK
    assert late.finding.confidence >= 0.9
    assert "restart" in text_of(late.finding)


def test_a_frozen_engine_with_running_requests_is_stuck_too():
    watched = Watched(DemoServer(max_num_seqs=4))
    watched.run(5, DemoLoad(users=12))
    watched.engine.is_frozen = True
    assert delay_s(watched.run(15), Limit.STUCK) <= 12


def test_a_server_whose_steps_take_long_is_given_twice_that_before_it_is_called_stuck():
    def page(top_bound):
        steps = histogram("kvctl:step_duration_seconds", (1.0, top_bound), (5, 1, 0), 9.0)
        return gauges(1, 5, 0.1) + "vllm:generation_tokens_total 100\n" + steps

    assert verdict_of(*[page(2.5)] * 4, step_s=3.0).limit is Limit.STUCK
    slow = verdict_of(*[page(10.0)] * 4, step_s=3.0)
    assert slow.limit is Limit.UNKNOWN
    assert "too short to call it stuck" in slow.finding.summary


def test_one_long_step_with_nobody_waiting_is_not_stuck():
    page = gauges(1, 0, 0.1) + "vllm:generation_tokens_total 100\n"
    assert verdict_of(page, page, page, step_s=3.0).limit is not Limit.STUCK
    assert verdict_of(page, page, page, page, step_s=3.0).finding.confidence <= 0.6


def test_deferred_requests_are_held_back_and_not_short_of_room():
    def page(tokens):
        waiting = 'vllm:num_requests_waiting_by_reason{reason="%s"} %d\n'
        lora = 'vllm:lora_requests_info{max_lora="4",waiting_lora_adapters="x"} 1\n'
        return (
            gauges(4, 6, 0.2)
            + waiting % ("capacity", 1)
            + waiting % ("deferred", 5)
            + lora
            + f"vllm:generation_tokens_total {tokens}\n"
        )

    verdict = verdict_of(page(0), page(50), page(100))
    assert verdict.limit is Limit.DEFERRED
    assert "--max-loras 8" in text_of(verdict.finding)


def point(running, tokens_per_s, itl_s):
    return Point(0.0, running, 0.0, 0.3, tokens_per_s, 0.0, itl_s, None, None, 0.0)


def decode_page(running, tokens):
    return gauges(running, 0, 0.3) + f"vllm:generation_tokens_total {tokens}\nvllm:prompt_tokens_total 0\n"


def test_more_requests_that_bring_no_more_tokens_are_decode_bound():
    history = [point(8, 800, 0.010) for _ in range(5)] + [point(24, 840, 0.0286) for _ in range(5)]
    verdict = diagnose(snapshot_of(decode_page(24, 0), decode_page(24, 840)), history)
    assert verdict.limit is Limit.DECODE_BANDWIDTH
    assert "8 -> 24 running requests brought 800 -> 840 tokens/s" in text_of(verdict.finding)


def test_a_batch_that_still_pays_is_healthy():
    history = [point(8, 800, 0.010) for _ in range(5)] + [point(24, 2200, 0.011) for _ in range(5)]
    assert diagnose(snapshot_of(decode_page(24, 0), decode_page(24, 2200)), history).limit is Limit.HEALTHY
    flat = [point(24, 840, 0.0286) for _ in range(10)]
    assert diagnose(snapshot_of(decode_page(24, 0), decode_page(24, 840)), flat).limit is Limit.HEALTHY


def prefix_page(requests, *, block=16, prompt=40.0, reasons=None):
    info = f'vllm:cache_config_info{{block_size="{block}",num_gpu_blocks="1000"}} 1\n'
    queries = requests * prompt
    lines = f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total 0\n"
    lines += f"vllm:prompt_tokens_total {queries}\nvllm:generation_tokens_total {requests * 10}\n"
    ttft = histogram("vllm:time_to_first_token_seconds", (1.0,), (requests, 0), requests * 0.01)
    for reason, share in (reasons or {}).items():
        lines += f'kvctl:prefix_cache_miss_tokens_total{{reason="{reason}"}} {queries * share}\n'
    return gauges(2, 0, 0.1) + info + lines + ttft


@pytest.mark.parametrize(
    ("first", "second", "confidence", "why"),
    [
        (prefix_page(0, block=128), prefix_page(30, block=128), 0.75, "at most one whole block of 128"),
        (prefix_page(0, prompt=500), prefix_page(30, prompt=500), 0.5, "does not say which"),
        (
            prefix_page(0, reasons={"partial_block": 1.0}),
            prefix_page(30, reasons={"partial_block": 0.9, "new": 0.1}),
            0.8,
            "90% of the tokens fill no whole block",
        ),
        (
            prefix_page(0, reasons={"disabled": 1.0}),
            prefix_page(30, reasons={"disabled": 1.0}),
            0.8,
            "prefix caching is off",
        ),
    ],
    ids=["short-prompts", "unknown", "kvctl-partial", "kvctl-disabled"],
)
def test_lookups_without_a_single_hit_say_why_as_far_as_the_page_does(first, second, confidence, why):
    verdict = verdict_of(first, second)
    assert verdict.limit is Limit.PREFIX_TOO_SHORT
    assert verdict.finding.confidence == confidence
    assert why in text_of(verdict.finding)


def test_prompts_that_simply_differ_are_no_limit():
    pages = [prefix_page(n, prompt=500, reasons={"new": 0.98, "partial_block": 0.02}) for n in (0, 30)]
    verdict = verdict_of(*pages)
    assert verdict.limit is Limit.HEALTHY
    assert "the prefix cache found nothing" in text_of(verdict.finding)


def frontend_page(requests, cpu_s, ttft_s):
    def spread(name, seconds):
        return histogram(f"vllm:{name}", (0.3, 1.0), (requests, 0, 0), requests * seconds)

    return (
        gauges(3, 0, 0.1)
        + f"process_cpu_seconds_total {cpu_s}\nvllm:generation_tokens_total {requests * 20}\n"
        + spread("time_to_first_token_seconds", ttft_s)
        + spread("request_queue_time_seconds", 0.001)
        + spread("request_prefill_time_seconds", 0.05)
    )


@pytest.mark.parametrize(("cpu_s", "ttft_s", "confidence"), [(4.9, 0.9, 0.85), (4.9, 0.06, 0.7), (0.5, 0.9, 0.6)])
def test_latency_outside_the_engine_is_the_frontend(cpu_s, ttft_s, confidence):
    verdict = verdict_of(frontend_page(0, 0, ttft_s), frontend_page(50, cpu_s, ttft_s), step_s=5.0)
    assert verdict.limit is Limit.FRONTEND
    assert verdict.finding.confidence == confidence


def test_an_api_process_with_time_and_no_latency_of_its_own_is_not_the_limit():
    verdict = verdict_of(frontend_page(0, 0, 0.06), frontend_page(50, 1.0, 0.06), step_s=5.0)
    assert verdict.limit is Limit.HEALTHY


def test_a_sleeping_engine_is_idle_and_said_to_sleep():
    page = gauges(0, 0, 0.0) + 'vllm:engine_sleep_state{sleep_state="awake"} 0\n'
    verdict = verdict_of(page, page)
    assert verdict.limit is Limit.IDLE
    assert "sleep" in verdict.finding.summary


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("vllm:kv_cache_usage_perc 0.5\n", "running requests and waiting requests"),
        ("vllm:num_requests_running 1\n", "does not say waiting requests"),
        ("trtllm_kv_cache_utilization 0.5\n", "running requests"),
    ],
)
def test_a_page_without_the_essentials_is_unknown_and_names_them(page, says):
    verdict = verdict_of(page, page)
    assert verdict.limit is Limit.UNKNOWN
    assert says in verdict.finding.summary


def test_one_reading_or_none_is_unknown():
    assert verdict_of(gauges(1, 0)).limit is Limit.UNKNOWN
    assert diagnose(None).limit is Limit.UNKNOWN


def test_a_queue_that_nothing_explains_is_unknown_and_names_what_would():
    pages = [gauges(run, 5) + f"vllm:generation_tokens_total {n}\n" for n, run in enumerate((3, 5, 4, 6))]
    verdict = verdict_of(*pages)
    assert verdict.limit is Limit.UNKNOWN
    assert {"missing: KV usage", "missing: max_num_seqs"} <= {e.text for e in verdict.finding.evidence}


def test_when_two_limits_show_the_nearer_to_the_cause_wins_and_the_other_is_named():
    watched = Watched(DemoServer(kv_tokens=8000, exports_limits=False))
    view = watched.run(20, KV_LOAD)[-1]
    assert view.verdict.limit is Limit.KV_BLOCKS
    assert Limit.PREFIX_TOO_SHORT in [other.limit for other in view.verdict.also]


def test_the_same_pages_give_the_same_verdict():
    one, two = (Watched(DemoServer(kv_tokens=8000)).run(20, KV_LOAD)[-1].verdict for _ in range(2))
    assert one == two


def test_every_limit_has_a_title_an_explanation_and_a_json_object():
    assert set(TITLES) == set(EXPLAINED) == set(Limit)
    verdict = Watched(DemoServer(max_num_seqs=8)).run(20, SEATS_LOAD)[-1].verdict
    found = verdict.to_json(Server.KVCTL)
    assert found["limit"] == "max_num_seqs"
    assert found["advice"][0]["kvctl"] == found["advice"][0]["vllm"] == "--max-num-seqs 32"
    assert {"limit", "confidence", "evidence", "advice", "explain"} <= set(found)
    assert all({"text", "metric", "value"} == set(fact) for fact in found["evidence"])
