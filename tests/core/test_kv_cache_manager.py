import pytest

from kvctl.core.block_pool import BlockPool
from kvctl.core.config import CacheConfig
from kvctl.core.kv_cache_groups import KVCacheGroup, group_layers
from kvctl.core.kv_cache_manager import KVCacheManager
from kvctl.core.sampling_params import SamplingParams
from kvctl.errors import InvariantViolation
from tests.support.schedulers import FULL, make_request

SLIDING = (KVCacheGroup((0,), None), KVCacheGroup((1,), 6))


def manager(num_blocks: int = 50, groups: tuple[KVCacheGroup, ...] = FULL, caching: bool = True) -> KVCacheManager:
    config = CacheConfig(block_size=4, enable_prefix_caching=caching)
    return KVCacheManager(BlockPool(num_blocks, caching), config, groups, max_step_tokens=16)


def computed(kv: KVCacheManager, name: str, tokens: list[int], **options: object):
    """Admit a request and compute all its tokens."""
    request = make_request(name, tokens, **options)
    prefix = kv.find_cached_prefix(request)
    assert kv.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix) is not None
    request.num_computed_tokens = request.num_tokens
    kv.check_integrity()
    return request


def test_blocks_are_taken_as_tokens_need_them() -> None:
    kv = manager()
    request = make_request("a", 10)
    assert kv.allocate_slots(request, 5) == ([1, 2],)
    request.num_computed_tokens = 5
    assert kv.allocate_slots(request, 3) == ([],)
    request.num_computed_tokens = 8
    assert kv.allocate_slots(request, 1) == ([3],)
    assert kv.block_tables(request) == ([1, 2, 3],) and request.allocated_tokens == 12
    kv.free(request)
    assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks
    kv.check_integrity()


def test_a_refusal_changes_nothing() -> None:
    kv = manager(num_blocks=4)
    request = make_request("a", 12)
    assert kv.allocate_slots(request, 8) is not None
    request.num_computed_tokens = 8
    assert kv.allocate_slots(request, 9) is None
    assert kv.block_tables(request) == ([1, 2],) and kv.pool.num_free_blocks == 1
    kv.check_integrity()


def test_a_shared_prefix_is_stored_once() -> None:
    kv = manager()
    tokens = list(range(100, 116))
    first = computed(kv, "a", [*tokens, 1, 2])
    second = computed(kv, "b", [*tokens, 3, 4])
    assert kv.block_tables(first)[0][:4] == kv.block_tables(second)[0][:4]
    assert kv.pool.num_usable_blocks - kv.pool.num_free_blocks == 4 + 1 + 1
    assert kv.pool.blocks[kv.block_tables(first)[0][0]].ref_count == 2


def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    kv = manager()
    computed(kv, "a", list(range(16)))
    assert kv.find_cached_prefix(make_request("b", list(range(16)))).num_tokens == 12
    assert kv.find_cached_prefix(make_request("c", [*range(16), 99])).num_tokens == 16


def test_a_twin_of_the_same_step_already_hits() -> None:
    kv = manager()
    first = make_request("a", list(range(10)))
    kv.allocate_slots(first, 10)  # scheduled, not computed yet
    assert kv.find_cached_prefix(make_request("b", list(range(10)))).num_tokens == 8


def test_only_scheduled_tokens_are_registered() -> None:
    kv = manager()
    first = make_request("a", list(range(16)))
    kv.allocate_slots(first, 6)
    assert kv.find_cached_prefix(make_request("b", list(range(16)))).num_tokens == 4


def test_prefixes_outlive_tails() -> None:
    kv = manager(num_blocks=11)
    document = computed(kv, "a", list(range(40)))  # all 10 blocks
    kv.free(document)
    other = computed(kv, "x", list(range(500, 516)))  # evicts 4 blocks: the tail of the document
    assert kv.find_cached_prefix(make_request("b", list(range(40)))).num_tokens == 24
    kv.free(other)


def test_salts_and_adapters_do_not_share() -> None:
    kv = manager()
    computed(kv, "a", list(range(12)), cache_salt="tenant 1")
    assert kv.find_cached_prefix(make_request("b", list(range(12)), cache_salt="tenant 1")).num_tokens == 8
    for options in ({}, {"cache_salt": "tenant 2"}, {"lora_name": "x", "cache_salt": "tenant 1"}):
        assert kv.find_cached_prefix(make_request("c", list(range(12)), **options)).num_tokens == 0


def test_prompt_logprobs_write_the_cache_but_do_not_read_it() -> None:
    kv = manager()
    asks = SamplingParams(prompt_logprobs=1)
    computed(kv, "a", list(range(12)), params=asks)
    assert kv.find_cached_prefix(make_request("b", list(range(12)), params=asks)).num_tokens == 0
    assert kv.find_cached_prefix(make_request("c", list(range(12)))).num_tokens == 8


def test_with_caching_off_nothing_is_found() -> None:
    kv = manager(caching=False)
    request = computed(kv, "a", list(range(12)))
    kv.free(request)
    assert kv.find_cached_prefix(make_request("b", list(range(12)))).num_tokens == 0
    assert kv.pool.num_cached_blocks == 0


def test_a_whole_sequence_is_reserved_at_admission() -> None:
    kv = manager(num_blocks=6)
    request = make_request("a", 24)
    prefix = kv.find_cached_prefix(request)
    assert kv.allocate_slots(request, 4, prefix, reserve_tokens=24) is None
    assert kv.allocate_slots(request, 4, prefix, reserve_tokens=20) is not None


def test_cached_blocks_in_the_free_queue_count_as_needed() -> None:
    kv = manager(num_blocks=5)
    kv.free(computed(kv, "a", list(range(12))))
    request = make_request("b", [*range(12), *range(50, 55)])
    prefix = kv.find_cached_prefix(request)
    assert prefix.num_tokens == 12 and kv.pool.num_free_blocks == 4
    assert kv.allocate_slots(request, 5, prefix) is None  # 3 revived + 2 new > 4
    assert kv.allocate_slots(request, 4, prefix) is not None


def test_the_watermark_keeps_blocks_free() -> None:
    kv = manager(num_blocks=5)
    request = make_request("a", 12)
    assert kv.allocate_slots(request, 12, watermark_blocks=2) is None
    assert kv.allocate_slots(request, 12, watermark_blocks=1) is not None


# ---- sliding windows ----


def test_blocks_outside_the_window_are_released() -> None:
    kv = manager(groups=SLIDING)
    request = make_request("a", 30)
    for start in range(0, 28, 4):
        request.num_computed_tokens = start
        assert kv.allocate_slots(request, 4) is not None
        kv.check_integrity()
    full, window = kv.block_tables(request)
    assert 0 not in full
    # The last chunk starts at token 24 and looks back over 5 tokens, to 19: block 4 and later must be there.
    assert window[:4] == [0] * 4 and 0 not in window[4:]


def test_a_window_needs_only_its_last_blocks_to_be_cached() -> None:
    kv = manager(groups=SLIDING)
    first = make_request("a", list(range(24)))
    for start in range(0, 24, 4):
        first.num_computed_tokens = start
        kv.allocate_slots(first, 4)
    first.num_computed_tokens = 24
    kv.free(first)
    prefix = kv.find_cached_prefix(make_request("b", [*range(24), 7]))
    assert prefix.num_tokens == 24
    assert [block.block_id == 0 for block in prefix.blocks[1]] == [True] * 4 + [False] * 2
    kv.check_integrity()


def test_a_hit_is_as_long_as_every_group_allows() -> None:
    kv = manager(num_blocks=50, groups=SLIDING)
    first = make_request("a", list(range(32)))
    kv.allocate_slots(first, 32)
    tables = kv.block_tables(first)
    kv.free(first)
    # Forget block 5 of the window group: hits of 6 blocks and more lack it, 5 blocks have 3 and 4.
    kv.pool.unregister(kv.pool.blocks[tables[1][5]])
    assert kv.find_cached_prefix(make_request("b", [*range(24), 1])).num_tokens == 20
    assert kv.find_cached_prefix(make_request("c", [*range(32), 1])).num_tokens == 32
    # Forget block 3 of the full group: nothing beyond it counts, and the window group has what 12 tokens need.
    kv.pool.unregister(kv.pool.blocks[tables[0][3]])
    assert kv.find_cached_prefix(make_request("d", [*range(32), 1])).num_tokens == 12


def test_a_window_bounds_what_a_long_request_needs() -> None:
    kv = manager(groups=SLIDING)  # at most 16 tokens a step, window 6
    assert kv.blocks_for(400) == 100 + (-(-(5 + 16) // 4) + 1)
    assert kv.capacity_tokens(10_000) == (49 - 7) * 4


def test_uncomputed_blocks_leave_the_cache() -> None:
    kv = manager()
    request = make_request("a", list(range(16)))
    kv.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    kv.allocate_slots(request, 8)
    kv.unregister_uncomputed(request, 8)
    assert kv.find_cached_prefix(make_request("b", [*range(16), 1])).num_tokens == 8
    kv.check_integrity()


def test_misses_have_reasons() -> None:
    kv = manager(num_blocks=6)
    cold = make_request("a", list(range(10)))
    assert kv.miss_reasons(cold, kv.find_cached_prefix(cold)) == {"partial_block": 2, "new": 8}
    kv.free(computed(kv, "b", list(range(10))))
    kv.free(computed(kv, "c", list(range(600, 620))))
    again = make_request("d", list(range(10)))
    assert kv.miss_reasons(again, kv.find_cached_prefix(again)) == {"partial_block": 2, "evicted": 8}
    asks = make_request("e", list(range(10)), params=SamplingParams(prompt_logprobs=0))
    assert kv.miss_reasons(asks, kv.find_cached_prefix(asks)) == {"prompt_logprobs": 10}
    off = manager(caching=False)
    assert off.miss_reasons(cold, off.find_cached_prefix(cold)) == {"disabled": 10}


def test_check_integrity_notices_a_lost_reference() -> None:
    kv = manager()
    request = computed(kv, "a", list(range(8)))
    kv.pool.blocks[kv.block_tables(request)[0][0]].ref_count += 1
    with pytest.raises(InvariantViolation, match="owners"):
        kv.check_integrity()


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None] * 3, [((0, 1, 2), None)]),
        ([4096] * 2, [((0, 1), 4096)]),
        # Gemma 3 270M: 15 sliding and 3 full layers, so blocks of 3 layers and 6 groups
        (([512] * 5 + [None]) * 3, [((5, 11, 17), None)]),
    ],
)
def test_layers_are_grouped_by_window(windows: list[int | None], expected: list[object]) -> None:
    groups = group_layers(windows)
    assert [(g.layer_indices, g.window_tokens) for g in groups][: len(expected)] == expected
    assert sorted(i for g in groups for i in g.layer_indices) == list(range(len(windows)))
    assert len({len(g.layer_indices) for g in groups}) == 1
