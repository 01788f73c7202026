import pytest

from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.core.request import FinishReason, Request, WaitingReason
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import ModelRunnerOutput
from kvctl.errors import ConfigError, InvalidRequest
from tests.support.schedulers import make_request, make_scheduler, run_all, run_step, scheduled

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
    assert s.waiting_reason("c") is None and s.requests["c"].waiting_reason is None


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
        ({"stop_token_ids": (2,)}, [5, 2], FinishReason.STOP, None),  # as end of sequence, not as a stop token
        ({"stop_token_ids": (2,), "ignore_eos": True}, [5, 2], FinishReason.STOP, 2),
        ({"stop_token_ids": (6,), "max_tokens": 2}, [5, 6], FinishReason.STOP, 6),
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
