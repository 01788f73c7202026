"""Blocks, tokens and concurrency against lines that vLLM printed and against counting by hand."""

import pytest

from kvctl.core.block_pool import BlockPool
from kvctl.core.config import CacheConfig
from kvctl.core.kv_cache_groups import group_layers
from kvctl.core.kv_cache_manager import KVCacheManager
from kvctl.errors import OutOfMemory
from kvctl.sizing.kv_plan import (
    KVLayout,
    KVPlan,
    blocks_worth_having,
    longest_fitting_request,
    padding_note,
    plan_kv_cache,
)

GIB = 1 << 30


def layout(windows, *, block_size=16, page_bytes=1000, in_flight_tokens=2048):
    return KVLayout(group_layers(windows), block_size, page_bytes, in_flight_tokens)


FULL = layout([None] * 32)
HYBRID = layout(([512] * 5 + [None]) * 4 + [512] * 2)  # Gemma 3 1B: 22 sliding layers, 4 full


def test_the_line_is_vllms_word_for_word():
    plan = KVPlan(FULL, 2702, 8192)
    assert plan.describe() == ("KV cache size: 43,232 tokens, Maximum concurrency for 8,192 tokens per request: 5.28x")
    assert plan.describe("GPU KV cache").startswith("GPU KV cache size: 43,232 tokens")


def test_a_uniform_model_holds_blocks_times_block_size_tokens():
    plan = KVPlan(FULL, 1000, 1600)
    assert plan.capacity_tokens == 16_000
    assert plan.max_concurrency == 10.0
    assert plan.kv_cache_bytes == 1000 * 32 * 1000


def test_a_hybrid_model_counts_each_groups_blocks():
    # 26 layers: blocks of 4 layers; one full group, six sliding ones. A request of 32,768 tokens holds 2,048 blocks
    # in the full group and ceil((511 + 2048) / 16) + 1 = 161 in each sliding one.
    assert len(HYBRID.groups) == 7
    assert HYBRID.block_bytes == 4 * 1000
    assert HYBRID.blocks_per_request(32_768) == 2048 + 6 * 161
    plan = KVPlan(HYBRID, 30_140, 32_768)
    assert plan.max_concurrency == pytest.approx(10.0)
    assert plan.capacity_tokens == 327_680


def test_memory_is_cut_into_whole_blocks():
    plan = plan_kv_cache(FULL, 160, available_bytes=32_000 * 100 + 31_999)
    assert plan.num_blocks == 100
    assert plan_kv_cache(FULL, 160, available_bytes=0, num_blocks_override=11).num_blocks == 11


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=["full", "hybrid"])
def test_one_request_of_the_longest_length_must_fit_beside_the_null_block(shape):
    needed = shape.blocks_per_request(5000) + 1
    assert plan_kv_cache(shape, 5000, available_bytes=needed * shape.block_bytes).num_blocks == needed
    with pytest.raises(OutOfMemory) as caught:
        plan_kv_cache(shape, 5000, available_bytes=needed * shape.block_bytes - 1)
    assert "5,000 tokens" in caught.value.message
    assert "--max-model-len" in caught.value.hint
    fits = longest_fitting_request(shape, needed - 1, 5000)
    assert f"{fits:,} tokens would fit" in caught.value.message
    assert shape.blocks_per_request(fits) + 1 <= needed - 1 < shape.blocks_per_request(fits + 1) + 1


def test_no_memory_at_all_is_told_without_a_length_that_fits():
    with pytest.raises(OutOfMemory) as caught:
        plan_kv_cache(FULL, 100, available_bytes=10)
    assert "would fit" not in caught.value.message


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=["full", "hybrid"])
def test_what_the_plan_lets_in_the_scheduler_can_run(shape):
    """The KV cache manager's own count never exceeds the plan's."""
    for max_model_len in (1, 15, 16, 17, 600, 5000):
        plan = plan_kv_cache(
            shape, max_model_len, available_bytes=0, num_blocks_override=shape.blocks_per_request(max_model_len) + 1
        )
        manager = KVCacheManager(
            BlockPool(plan.num_blocks), CacheConfig(), shape.groups, max_step_tokens=shape.in_flight_tokens
        )
        assert manager.capacity_tokens(max_model_len) == max_model_len


def test_more_blocks_than_any_load_could_use_are_not_worth_having():
    assert blocks_worth_having(FULL, 160, 8) == 81


def test_padding_is_told_where_the_last_group_has_fewer_layers():
    assert padding_note(FULL.groups) is None
    assert padding_note(HYBRID.groups) == (  # 26 layers in 7 groups of 4
        "KV blocks have room for 4 layers, some groups have fewer: 7.1% stays empty"
    )
