import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvctl.core.block_pool import Block, BlockPool
from kvctl.errors import ConfigError, InvariantViolation


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert pool.num_usable_blocks == 3
    assert ids(pool.allocate(3)) == [1, 2, 3]
    assert pool.usage == 1.0
    with pytest.raises(InvariantViolation, match="1 blocks asked, 0 are free"):
        pool.allocate(1)


def test_usage_is_the_share_that_is_referenced_the_null_block_left_out() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"a")
    assert pool.usage == 0.5
    pool.free(blocks)
    assert pool.usage == 0.0, "cached and referenced by nobody is free"


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds nothing"):
        BlockPool(1)


def test_blocks_without_content_are_reused_first_and_last_freed_first() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.free(reversed(blocks))  # tail first
    assert pool.free_block_ids() == [1, 2, 3, 4, 5]


def test_cached_blocks_go_to_the_back_tail_before_head() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.register(block, b"key%d" % index)
    pool.free(reversed(blocks))
    assert pool.free_block_ids() == [4, 5, 3, 2, 1]


def test_content_stays_findable_until_its_block_is_handed_out_again() -> None:
    pool = BlockPool(3)
    (block, _) = pool.allocate(2)
    pool.register(block, b"a")
    pool.free([block])
    assert pool.find_cached(b"a") is block and not pool.was_evicted(b"a")
    assert pool.allocate(1) == [block]
    assert pool.find_cached(b"a") is None and pool.was_evicted(b"a")


def test_only_the_last_evictions_are_remembered() -> None:
    pool = BlockPool(3)
    for number in range(6):
        (block,) = pool.allocate(1)
        pool.register(block, b"%d" % number)
        pool.free([block])
    assert [pool.was_evicted(b"%d" % number) for number in range(6)] == [False, True, True, True, False, False]


def test_a_hit_leaves_the_middle_of_the_free_queue() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.register(block, b"%d" % block.block_id)
    pool.free(blocks)
    pool.touch([blocks[1], blocks[2]])
    assert pool.free_block_ids() == [1, 4]
    pool.touch([blocks[1]])
    assert blocks[1].ref_count == 2
    pool.check_integrity()


def test_equal_content_may_stand_in_several_blocks_and_losing_one_keeps_the_others() -> None:
    pool = BlockPool(5)
    first, second, third = pool.allocate(3)
    for block in (first, second, third):
        pool.register(block, b"same")
    assert pool.find_cached(b"same") is first and pool.num_cached_blocks == 3
    pool.free([second])
    pool.allocate(2)  # takes the never used block 4, then `second`
    pool.check_integrity()
    assert pool.find_cached(b"same") is first
    pool.free([first])
    pool.allocate(1)
    assert pool.find_cached(b"same") is third and not pool.was_evicted(b"same")


def test_freeing_too_often_is_noticed() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(InvariantViolation, match="freed more often"):
        pool.free(blocks)


def test_the_cache_can_be_forgotten_only_when_nothing_is_referenced() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"a")
    assert not pool.reset_cache() and pool.find_cached(b"a")
    pool.free(blocks)
    order = pool.free_block_ids()
    assert pool.reset_cache() and pool.find_cached(b"a") is None
    assert pool.free_block_ids() == order
    pool.check_integrity()


@pytest.mark.parametrize("damage", ["refs", "key", "map", "null"])
def test_check_integrity_notices_damage(damage: str) -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.register(block, b"a")
    pool.check_integrity()
    if damage == "refs":
        block.ref_count = 0
    elif damage == "key":
        block.key = None
    elif damage == "map":
        pool.blocks[2].key = b"a"
    else:
        pool.null_block.ref_count = 1
    with pytest.raises(InvariantViolation):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Random use against a plain model: a list of owners per block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.owned: list[Block] = []  # one entry per reference

    @rule(n=st.integers(1, 5))
    def allocate(self, n: int) -> None:
        if n <= self.pool.num_free_blocks:
            expected = self.pool.free_block_ids()[:n]
            blocks = self.pool.allocate(n)
            assert ids(blocks) == expected and all(block.key is None for block in blocks)
            self.owned += blocks

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.free([block])

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(self.owned))
        if block.key is None:
            self.pool.register(block, key)

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def hit(self, key: bytes) -> None:
        block = self.pool.find_cached(key)
        if block is not None:
            assert block.key == key
            self.pool.touch([block])
            self.owned.append(block)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        self.pool.unregister(data.draw(st.sampled_from(self.owned)))

    @invariant()
    def holds(self) -> None:
        self.pool.check_integrity()
        referenced = {block.block_id for block in self.owned}
        assert len(referenced) + self.pool.num_free_blocks == self.pool.num_usable_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
