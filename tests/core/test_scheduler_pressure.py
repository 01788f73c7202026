"""When there is not room for all: who is admitted, who waits, who gives way, and what that costs."""

from kvctl.core.request import RequestStatus, WaitingReason
from kvctl.core.scheduler import Scheduler
from kvctl.core.step import ModelRunnerOutput
from tests.support.schedulers import make_request, make_scheduler, run_all, run_step, scheduled

# ---- admission ----


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


def test_what_is_reserved_is_the_sequence_with_its_output_less_what_is_cached() -> None:
    def admitted(num_free: int) -> bool:
        """A request of 13 tokens with its output: 4 blocks of 4, of which 2 are cached and in use elsewhere."""
        s = make_scheduler(num_blocks=20, long_prefill_token_threshold=1)  # the first chunk alone needs one block
        document = list(range(100, 108))
        s.add(make_request("keeps the document in use", [*document, 1], max_tokens=30))
        run_step(s)
        run_step(s)
        back = make_request("back", [*document, 2, 3], max_tokens=9)
        back.token_ids += [4, 5, 6]  # 13 tokens: 4 blocks, 2 of them hits
        s.add(back)
        s.kv_cache_manager.pool.allocate(s.kv_cache_manager.pool.num_free_blocks - num_free)
        plan = s.schedule()
        return "back" in plan.request_ids

    assert not admitted(1)
    assert admitted(2)


def test_the_watermark_counts_only_beside_running_requests() -> None:
    s = make_scheduler(num_blocks=11, watermark=0.3)  # 3 of 11
    s.add(make_request("alone", 36, max_tokens=2))  # 9 of 10 blocks
    assert list(scheduled(run_step(s)[0])) == ["alone"]
    run_all(s)
    s.reset_prefix_cache()
    s.add(make_request("first", 8, max_tokens=4))  # 2 blocks, soon 3
    run_step(s)
    s.add(make_request("second", 24, max_tokens=2))  # 6 of the 7 that are left
    assert list(scheduled(run_step(s)[0])) == ["first"]
    assert s.waiting_reason("second") is WaitingReason.KV_BLOCKS
    assert len(run_all(s)["second"]) == 2


def test_a_running_request_may_take_what_the_watermark_keeps() -> None:
    s = make_scheduler(num_blocks=11, watermark=0.3)
    s.add(make_request("a", 8, max_tokens=32))  # 40 tokens: all 10 blocks
    assert len(run_all(s)["a"]) == 32
    assert s.take_stats().num_preemptions == 0


def test_an_attempt_that_was_refused_leaves_no_trace_in_the_figures() -> None:
    s = make_scheduler(num_blocks=9)
    s.add(make_request("a", 12, max_tokens=9))
    run_step(s)
    s.take_stats()
    s.add(make_request("big", 24, max_tokens=2))
    for _ in range(3):
        run_step(s)
        stats = s.take_stats()
        assert (stats.prefix_cache_queries, stats.prefix_miss_reasons, stats.num_prefill_tokens) == (0, {}, 0)
    assert s.requests["big"].num_cached_tokens == -1
    run_all(s)
    assert s.take_stats().prefix_cache_queries == 24


def test_a_long_request_that_waits_for_blocks_is_not_looked_up_again_every_step() -> None:
    s = make_scheduler(num_blocks=70, max_num_batched_tokens=256)
    document = list(range(160))
    s.add(make_request("in use", [*document, 1], max_tokens=30))
    for _ in range(6):
        run_step(s)
    s.add(make_request("long", [*document, *range(1000, 1111)], max_tokens=2))  # 28 blocks more, 27 and less are free
    pool, asked = s.kv_cache_manager.pool, []
    find = pool.find_cached
    pool.find_cached = lambda key: (asked.append(key), find(key))[1]  # type: ignore[method-assign]
    run_step(s)
    assert len(asked) > 40  # its whole prefix, once
    asked.clear()
    for _ in range(20):
        run_step(s)
        assert s.waiting_reason("long") is WaitingReason.KV_BLOCKS
    assert len(asked) <= 20
    assert len(run_all(s)["long"]) == 2


def test_a_waiting_request_is_admitted_with_the_last_block_that_it_lacked() -> None:
    s = make_scheduler(num_blocks=9)
    s.add(make_request("short", 3, max_tokens=2))  # 1 block
    s.add(make_request("long", 13, max_tokens=3))  # 4 blocks
    run_step(s)
    s.add(make_request("waiting", 16, max_tokens=1))  # 4 blocks, 3 are free until `short` ends
    assert list(scheduled(run_step(s)[0])) == ["short", "long"]
    assert list(scheduled(run_step(s)[0])) == ["long", "waiting"]


def test_a_waiting_request_profits_at_once_from_a_prefix_that_another_one_computes() -> None:
    s = make_scheduler(num_blocks=16, long_prefill_token_threshold=6)
    document = list(range(40))
    s.add(make_request("first", [*document, 1], max_tokens=6))
    s.add(make_request("twin", [*document, *range(1000, 1018)], max_tokens=2))  # all 15 blocks, alone
    assert list(scheduled(run_step(s)[0])) == ["first"]  # holds 2 blocks, one is full: 14 more are needed of 13
    assert s.waiting_reason("twin") is WaitingReason.KV_BLOCKS
    plan, _ = run_step(s)  # holds 3 full ones: 12 of 12
    assert plan.new_requests[0].request_id == "twin" and plan.new_requests[0].num_computed_tokens == 12
    assert {name: len(tokens) for name, tokens in run_all(s).items()} == {"first": 6, "twin": 2}


def test_a_waiting_request_is_looked_up_again_after_another_one_was_admitted() -> None:
    """The other one took hold of blocks that both share: it needs fewer now, although no more are free."""
    s = make_scheduler(num_blocks=9, policy="priority")
    document = list(range(8))
    s.add(make_request("earlier", [*document, 1], max_tokens=1))
    run_step(s)
    s.add(make_request("running", 9, priority=1, max_tokens=3))  # 3 blocks
    run_step(s)
    s.add(make_request("low", [*document, *range(1000, 1016)], priority=5, max_tokens=2))  # 4 new ones and the 2 shared
    assert list(scheduled(run_step(s)[0])) == ["running"] and s.kv_cache_manager.pool.num_free_blocks == 5
    s.add(make_request("high", [*document, 2], priority=0, max_tokens=3))
    assert list(scheduled(run_step(s)[0])) == ["running", "high"]
    assert s.kv_cache_manager.pool.num_free_blocks == 5  # `running` has ended
    assert list(scheduled(run_step(s)[0])) == ["high", "low"]


# ---- preemption ----


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
    twin = make_request("twin", [*s.requests["low"].token_ids[:12], 1])
    assert s.kv_cache_manager.find_cached_prefix(twin).num_tokens == 8, "its third block was planned, never computed"
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


def test_of_equal_priorities_the_later_arrival_gives_way_whoever_was_admitted_last() -> None:
    s = make_scheduler(num_blocks=7, policy="priority")
    s.add(make_request("late", 8, priority=1, max_tokens=8, arrival_s=9.0))
    run_step(s)
    s.add(make_request("early", 11, priority=1, max_tokens=8, arrival_s=1.0))
    run_step(s)
    assert [r.request_id for r in s.running] == ["late", "early"]
    plan = next(plan for plan in (run_step(s)[0] for _ in range(4)) if plan.preempted_request_ids)
    assert plan.preempted_request_ids == ["late"]


def test_of_children_that_arrived_together_the_one_with_most_done_goes_on() -> None:
    s = make_scheduler(num_blocks=6, policy="priority")
    s.add(make_request("r_0", 8, max_tokens=8))
    run_step(s)
    s.add(make_request("r_1", 8, max_tokens=8))
    plan = next(plan for plan in (run_step(s)[0] for _ in range(8)) if plan.preempted_request_ids)
    assert plan.preempted_request_ids == ["r_1"]


def test_by_priority_one_that_preempts_itself_does_not_stop_those_behind_it() -> None:
    s = make_scheduler(num_blocks=6, policy="priority")
    s.add(make_request("unimportant", 8, priority=9, max_tokens=8))
    run_step(s)
    s.add(make_request("important", 5, priority=0, max_tokens=8, arrival_s=1.0))
    for _ in range(4):
        assert list(scheduled(run_step(s)[0])) == ["unimportant", "important"]
    plan, _ = run_step(s)  # all 5 blocks are held and the first in line needs one more
    assert plan.preempted_request_ids == ["unimportant"] and scheduled(plan) == {"important": 1}


def test_a_preempted_request_is_not_admitted_before_its_newest_token_is_known() -> None:
    s = make_scheduler(num_blocks=6)
    s.add(make_request("a", 8))
    s.add(make_request("b", 8))
    first = s.schedule()
    second = s.schedule()  # overlaps: `a` takes the last block, `b` gives way with a token on its way
    assert second.preempted_request_ids == ["b"] and s.requests["b"].num_in_flight == 1
    third = s.schedule()
    assert list(scheduled(third)) == ["a"]
    assert s.waiting_reason("b") is WaitingReason.PREEMPTION
    for plan, tokens in ((first, [7, 7]), (second, [7]), (third, [7])):
        s.update(plan, ModelRunnerOutput(list(tokens)))
        s.check_integrity()
    assert s.requests["b"].output_token_ids == [7] and s.requests["b"].num_in_flight == 0


def test_nobody_is_passed_over_when_one_that_was_planned_is_taken_back() -> None:
    s = make_scheduler(num_blocks=7, policy="priority")
    s.add(make_request("low", 8, priority=9, max_tokens=8))
    run_step(s)
    s.add(make_request("high", 8, priority=0, max_tokens=8, arrival_s=1.0))
    s.add(make_request("behind", 1, priority=1, max_tokens=8, arrival_s=2.0))
    assert list(scheduled(run_step(s)[0])) == ["low", "high", "behind"]  # 3 + 2 + 1 blocks of 6
    plan, _ = run_step(s)  # `high` needs a third
    assert plan.preempted_request_ids == ["low"] and scheduled(plan) == {"high": 1, "behind": 1}


def test_a_preempted_request_keeps_its_output_and_computes_it_again_with_its_prompt() -> None:
    s = make_scheduler(num_blocks=6, caching=False)
    s.add(make_request("a", 8, max_tokens=9))
    s.add(make_request("b", 8, max_tokens=9))
    run_step(s)
    plan = next(plan for plan in (run_step(s)[0] for _ in range(8)) if plan.preempted_request_ids)
    assert plan.preempted_request_ids == ["b"]
    so_far = s.requests["b"].num_output_tokens
    assert so_far > 0
    again = next(plan for plan in (run_step(s)[0] for _ in range(12)) if plan.new_requests)
    (new,) = again.new_requests
    assert (new.request_id, len(new.token_ids), new.num_prompt_tokens) == ("b", 8 + so_far, 8)
    assert scheduled(again)["b"] == 8 + so_far
