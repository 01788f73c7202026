import pytest

from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.core.request import FinishReason, Request, RequestStatus, WaitingReason
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.scheduler import Scheduler
from kvctl.core.step import ModelRunnerOutput
from kvctl.errors import ConfigError, InvalidRequest
from tests.support.schedulers import make_request, make_scheduler, run_all, run_step


def scheduled(plan) -> dict[str, int]:
    return dict(zip(plan.request_ids, plan.num_scheduled_tokens, strict=True))


# ---- the one rule ----


def test_a_prompt_is_computed_then_one_token_a_step() -> None:
    s = make_scheduler()
    s.add(make_request("a", 10, max_tokens=3))
    steps = [scheduled(run_step(s)[0]) for _ in range(3)]
    assert steps == [{"a": 10}, {"a": 1}, {"a": 1}]
    assert not s.has_work


def test_running_requests_come_before_waiting_ones_and_share_the_budget() -> None:
    s = make_scheduler(max_num_batched_tokens=16)
    s.add(make_request("a", 4))
    run_step(s)
    s.add(make_request("b", 40))
    plan = run_step(s)[0]
    assert scheduled(plan) == {"a": 1, "b": 15} and plan.total_num_scheduled_tokens == 16
    assert scheduled(run_step(s)[0]) == {"a": 1, "b": 15}
    assert scheduled(run_step(s)[0]) == {"a": 1, "b": 10}
    assert scheduled(run_step(s)[0]) == {"a": 1, "b": 1}


def test_a_chunked_prompt_gives_no_token_before_its_last_chunk() -> None:
    s = make_scheduler(max_num_batched_tokens=16)
    s.add(make_request("a", 40))
    assert [len(run_step(s)[1]) for _ in range(4)] == [0, 0, 1, 1]


def test_long_prompts_are_cut_at_the_threshold_unless_they_are_alone() -> None:
    s = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=8)
    s.add(make_request("a", 30))
    assert scheduled(run_step(s)[0]) == {"a": 30}
    s.add(make_request("b", 30))
    assert scheduled(run_step(s)[0]) == {"a": 1, "b": 8}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    s = make_scheduler(max_num_batched_tokens=20, max_model_len=20, enable_chunked_prefill=False)
    s.add(make_request("a", 12))
    s.add(make_request("b", 12))
    assert scheduled(run_step(s)[0]) == {"a": 12}
    assert s.waiting_reason("b") is WaitingReason.TOKEN_BUDGET
    assert scheduled(run_step(s)[0]) == {"a": 1, "b": 12}


def test_no_more_requests_run_than_may() -> None:
    s = make_scheduler(max_num_seqs=2)
    for name in "abc":
        s.add(make_request(name, 4, max_tokens=2))
    assert list(scheduled(run_step(s)[0])) == ["a", "b"]
    assert s.waiting_reason("c") is WaitingReason.MAX_NUM_SEQS
    run_step(s)
    assert list(scheduled(run_step(s)[0])) == ["c"]
    assert s.waiting_reason("c") is None


def test_the_first_that_does_not_fit_stops_the_line() -> None:
    s = make_scheduler(num_blocks=9)  # 8 blocks of 4
    s.add(make_request("a", 12, max_tokens=4))
    run_step(s)
    s.add(make_request("big", 24, max_tokens=4))
    s.add(make_request("small", 4))
    assert list(scheduled(run_step(s)[0])) == ["a"]
    assert s.waiting_reason("big") is WaitingReason.KV_BLOCKS
    assert s.waiting_reason("small") is WaitingReason.KV_BLOCKS
    stats = s.take_stats()
    assert stats.waiting_by_reason == {"kv_blocks": 2} and stats.num_waiting == 2


def test_admission_reserves_the_whole_prompt_although_only_a_chunk_is_scheduled() -> None:
    def admitted(reserve: bool) -> bool:
        s = make_scheduler(num_blocks=9, max_num_batched_tokens=8, max_num_seqs=8, scheduler_reserve_full_isl=reserve)
        s.add(make_request("a", 16, max_tokens=9))
        run_step(s)
        run_step(s)
        s.add(make_request("b", 20, max_tokens=4))
        return "b" in scheduled(run_step(s)[0])

    assert not admitted(True)
    assert admitted(False)


# ---- pressure ----


def test_the_latest_admitted_request_makes_room_and_comes_back_first() -> None:
    s = make_scheduler(num_blocks=7)  # 6 blocks of 4
    s.add(make_request("a", 8, max_tokens=12))
    s.add(make_request("b", 8, max_tokens=12))
    s.add(make_request("later", 8, max_tokens=2))
    run_step(s)  # a and b take 4 blocks; `later` needs 2 more
    assert [r.request_id for r in s.running] == ["a", "b", "later"]
    plan, _ = run_step(s)  # each of a, b needs a third block
    assert "later" not in scheduled(plan)
    later = s.requests["later"]
    assert later.status is RequestStatus.PREEMPTED and later.num_computed_tokens == 0 and later.num_preemptions == 1
    assert next(iter(s.waiting)) is later
    assert s.waiting_reason("later") is WaitingReason.PREEMPTION


def test_a_step_that_preempted_admits_nobody() -> None:
    s = make_scheduler(num_blocks=6, max_num_batched_tokens=32)
    s.add(make_request("a", 8))
    s.add(make_request("b", 8))
    run_step(s)
    s.add(make_request("c", 1, max_tokens=1))
    plan, _ = run_step(s)  # a takes the last block, b preempts itself: 2 blocks are free, c would fit
    assert list(scheduled(plan)) == ["a"] and plan.preempted_request_ids == ["b"]
    assert s.kv_cache_manager.pool.num_free_blocks >= 1


def test_preempted_requests_give_the_same_tokens_and_the_runner_is_told() -> None:
    prompts = {name: [ord(name) * 7 + i for i in range(9)] for name in "abcdef"}

    def generate(num_blocks: int) -> tuple[dict[str, list[int]], int]:
        s = make_scheduler(num_blocks=num_blocks)
        for name, tokens in prompts.items():
            s.add(make_request(name, tokens, max_tokens=20))
        preemptions = 0
        known: set[str] = set()
        generated: dict[str, list[int]] = {}
        while s.has_work:
            plan, outputs = run_step(s)
            preemptions += s.take_stats().num_preemptions
            known -= {*plan.finished_request_ids, *plan.preempted_request_ids}
            known |= {new.request_id for new in plan.new_requests}
            assert set(plan.request_ids) <= known
            for output in outputs:
                generated.setdefault(output.request_id, []).extend(output.new_token_ids)
        return generated, preemptions

    roomy, none = generate(100)
    tight, some = generate(12)
    assert none == 0 and some > 5
    assert roomy == tight and all(len(tokens) == 20 for tokens in roomy.values())


def test_priority_preempts_the_least_important_and_undoes_its_part_of_the_step() -> None:
    s = make_scheduler(num_blocks=7, policy="priority")
    s.add(make_request("low", 8, priority=5, max_tokens=12))
    run_step(s)
    s.add(make_request("high", 11, priority=0, max_tokens=12, arrival_s=1.0))
    run_step(s)
    assert [r.request_id for r in s.running] == ["low", "high"]
    plans = [run_step(s)[0] for _ in range(3)]
    preempting = next(plan for plan in plans if plan.preempted_request_ids)
    assert preempting.preempted_request_ids == ["low"] and scheduled(preempting) == {"high": 1}
    assert preempting.total_num_scheduled_tokens == 1
    assert len(run_all(s)["low"]) + 3 >= 12


def beside_a_more_important_one(low_prompt: int, num_blocks: int) -> Scheduler:
    """`low` has computed 10 of its prompt's tokens, in chunks of 5; `high` runs behind it and needs a block next."""
    s = make_scheduler(num_blocks, policy="priority", max_num_batched_tokens=16, long_prefill_token_threshold=5)
    s.add(make_request("low", low_prompt, priority=5, max_tokens=4))
    s.add(make_request("other", 1, priority=5, max_tokens=1, arrival_s=1.0))
    assert scheduled(run_step(s)[0]) == {"low": 5, "other": 1}
    s.add(make_request("high", 4, priority=0, max_tokens=4, arrival_s=2.0))
    assert scheduled(run_step(s)[0]) == {"low": 5, "high": 4}
    s.take_stats()
    return s


def test_a_prompt_whose_chunk_ends_one_token_early_can_be_preempted_in_that_step() -> None:
    s = beside_a_more_important_one(low_prompt=16, num_blocks=6)
    plan, _ = run_step(s)  # low's chunk reaches token 15 of 16: nothing is sampled for it
    assert plan.preempted_request_ids == ["low"] and scheduled(plan) == {"high": 1}
    assert s.requests["low"].num_in_flight == 0
    assert {name: len(tokens) for name, tokens in run_all(s).items()} == {"high": 2, "low": 4}


def test_prompt_tokens_are_counted_once_whether_they_come_alone_or_are_taken_back() -> None:
    s = beside_a_more_important_one(low_prompt=11, num_blocks=5)
    plan, _ = run_step(s)  # low's last prompt token was planned, then high needed its blocks
    assert plan.preempted_request_ids == ["low"]
    assert s.take_stats().num_prefill_tokens == 0
    s = make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    s.add(make_request("a", 11, max_tokens=3))
    run_all(s)
    assert s.take_stats().num_prefill_tokens == 11


def test_more_important_requests_are_admitted_first() -> None:
    s = make_scheduler(max_num_seqs=1, policy="priority")
    for name, priority in (("c", 2), ("a", 0), ("b", 1)):
        s.add(make_request(name, 4, priority=priority, max_tokens=1))
    assert [run_step(s)[0].request_ids[0] for _ in range(3)] == ["a", "b", "c"]


def test_recomputed_tokens_are_not_prefix_hits() -> None:
    s = make_scheduler(num_blocks=7)
    s.add(make_request("a", 8, max_tokens=12))
    s.add(make_request("b", 8, max_tokens=12))
    totals: dict[str, int] = {"queries": 0, "hits": 0, "recomputed": 0, "preemptions": 0}
    while s.has_work:
        run_step(s)
        stats = s.take_stats()
        totals["queries"] += stats.prefix_cache_queries
        totals["hits"] += stats.prefix_cache_hits
        totals["recomputed"] += stats.num_recomputed_tokens
        totals["preemptions"] += stats.num_preemptions
    assert totals["preemptions"] > 0 and totals["recomputed"] > 0
    assert totals["queries"] == 16 and totals["hits"] == 0


# ---- prefix hits ----


def test_cached_tokens_are_not_scheduled_and_are_reported() -> None:
    s = make_scheduler()
    document = list(range(40))
    s.add(make_request("a", [*document, 1], max_tokens=1))
    run_step(s)
    s.take_stats()
    s.add(make_request("b", [*document, 2, 3], max_tokens=1))
    plan, outputs = run_step(s)
    assert scheduled(plan) == {"b": 2} and plan.new_requests[0].num_computed_tokens == 40
    assert outputs[0].num_cached_tokens == 40
    stats = s.take_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (42, 40)
    assert stats.prefix_miss_reasons == {"partial_block": 2}


# ---- ends ----


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({}, [5, 6, 2], FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 4}, [5, 2, 2, 2], FinishReason.LENGTH, None),
        ({"stop_token_ids": (6,)}, [5, 6], FinishReason.STOP, 6),
        ({"max_tokens": 2}, [5, 2], FinishReason.STOP, None),
        ({"max_tokens": 1}, [5], FinishReason.LENGTH, None),
    ],
)
def test_a_request_ends_for_the_right_reason(params, tokens, reason, stop_reason) -> None:
    s = make_scheduler()
    settings = SamplingParams(**{"max_tokens": 10, **params})
    s.add(Request("a", [1, 1, 1], settings, eos_token_ids=frozenset({2})))
    feed = iter(tokens)
    last = None
    while s.has_work:
        _, (last,) = run_step(s, lambda request: next(feed))
    assert next(feed, None) is None
    assert last is not None and (last.finish_reason, last.stop_reason) == (reason, stop_reason)


def test_the_model_length_ends_a_request() -> None:
    s = make_scheduler(max_model_len=12)
    s.add(make_request("a", 8, max_tokens=100))
    assert len(run_all(s)["a"]) == 4


def test_a_request_that_outgrows_the_whole_cache_ends_by_length_instead_of_waiting_for_ever() -> None:
    s = make_scheduler(num_blocks=5, max_model_len=1000)  # 16 tokens
    s.add(make_request("a", 8, max_tokens=100))
    s.add(make_request("b", 8, max_tokens=100))
    assert {name: len(tokens) for name, tokens in run_all(s).items()} == {"a": 8, "b": 8}


@pytest.mark.parametrize("length", [16, 17, 400])
def test_a_prompt_that_can_never_fit_is_refused_at_once(length: int) -> None:
    s = make_scheduler(num_blocks=5)
    with pytest.raises(InvalidRequest, match=f"{length} tokens, the whole KV cache takes 16"):
        s.add(make_request("a", length))
    assert not s.has_work


def test_a_prompt_as_long_as_the_model_is_refused() -> None:
    s = make_scheduler(max_model_len=10)
    with pytest.raises(InvalidRequest, match="10 tokens, the model takes 10"):
        s.add(make_request("a", 10))


def test_an_empty_prompt_and_a_used_id_are_refused() -> None:
    s = make_scheduler()
    with pytest.raises(InvalidRequest, match="no tokens"):
        s.add(make_request("a", []))
    s.add(make_request("a", 3))
    with pytest.raises(InvalidRequest, match="in use"):
        s.add(make_request("a", 3))


# ---- aborts ----


def test_an_abort_frees_the_blocks_at_once_whatever_the_request_was_doing() -> None:
    s = make_scheduler(num_blocks=9)
    s.add(make_request("running", 12, max_tokens=30))
    s.add(make_request("waiting", 30, max_tokens=2))
    run_step(s)
    assert s.abort("running") and s.kv_cache_manager.pool.num_free_blocks == 8
    assert s.abort("waiting") and not s.has_work
    assert not s.abort("running") and not s.abort("never seen")
    s.add(make_request("next", 4, max_tokens=1))
    assert run_step(s)[0].finished_request_ids == ["running"]  # the runner hears of it with the next step


def test_an_abort_while_the_step_runs_drops_its_token() -> None:
    s = make_scheduler()
    s.add(make_request("a", 4))
    s.add(make_request("b", 4))
    plan = s.schedule()
    s.abort("a")
    outputs = s.update(plan, ModelRunnerOutput([1, 2]))
    assert [o.request_id for o in outputs] == ["b"]
    s.check_integrity()


def test_the_prefix_cache_can_be_reset_when_idle() -> None:
    s = make_scheduler()
    s.add(make_request("a", list(range(20)), max_tokens=2))
    run_step(s)
    assert not s.reset_prefix_cache()
    run_all(s)
    assert s.reset_prefix_cache()
    s.add(make_request("b", list(range(20)), max_tokens=1))
    assert run_step(s)[1][0].num_cached_tokens == 0


def test_sliding_windows_let_long_requests_live_in_few_blocks() -> None:
    groups = (KVCacheGroup((0,), 8),)
    s = make_scheduler(num_blocks=10, groups=groups, max_num_batched_tokens=16, max_num_seqs=4)
    s.add(make_request("a", 100, max_tokens=50))  # 150 tokens in 36
    assert len(run_all(s)["a"]) == 50
    assert s.kv_cache_manager.pool.num_free_blocks == 9


# ---- configuration ----


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 8, "max_num_seqs": 9},
        {"enable_chunked_prefill": False, "max_model_len": 65},
        {"long_prefill_token_threshold": 1001},
        {"watermark": 1.0},
        {"policy": "lifo"},
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_scheduler(**options)
