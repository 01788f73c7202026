"""Who owns which KV block, and which free blocks still hold something worth keeping.

Knows block ids, reference counts and opaque cache keys only: no tokens, no requests, no tensors. Floor 0.

Invariants (`check_integrity` states them):
- block 0 is the null block, a placeholder that is never allocated, cached or freed; usable = num_blocks - 1;
- a block is in the free queue exactly when nobody references it; free + referenced = usable;
- every cache key maps to blocks that carry that key. A cached block stays cached while it lies in the free
  queue, until it is handed out again (lazy eviction).

Free queue, front to back: blocks without content (last freed first), then cached blocks (least recently used
first, the tail of a chain before its head). Everything here is O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from kvctl.errors import ConfigError, InvariantViolation

NULL_BLOCK_ID = 0


class Block:
    """One KV block: its id, how many block tables hold it, the key of its content if it is cached."""

    __slots__ = ("block_id", "key", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: bytes | None = None
        self.prev_free: Block | None = None  # both None: not in the free queue
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, {'cached' if self.key else 'not cached'})"


class FreeBlockQueue:
    """Doubly linked list through the blocks themselves, so that a cache hit can leave the middle in O(1)."""

    __slots__ = ("_ends", "num_blocks")

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ends = Block(-1)  # one sentinel closes the ring: next is the front, prev is the back
        self._ends.prev_free = self._ends.next_free = self._ends
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def _link(self, before: Block, block: Block, after: Block) -> None:
        block.prev_free = before
        block.next_free = after
        before.next_free = block
        after.prev_free = block
        self.num_blocks += 1

    def append(self, block: Block) -> None:
        """Put a block at the back: reused last."""
        back = self._ends.prev_free
        assert back is not None
        self._link(back, block, self._ends)

    def prepend(self, block: Block) -> None:
        """Put a block at the front: reused next."""
        front = self._ends.next_free
        assert front is not None
        self._link(self._ends, block, front)

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it stands."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise InvariantViolation(f"block {block.block_id} is not in the free queue")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_blocks -= 1

    def popleft(self) -> Block:
        """Take the front block."""
        front = self._ends.next_free
        assert front is not None
        if front is self._ends:
            raise InvariantViolation("the free queue is empty")
        self.remove(front)
        return front

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next_free
        while block is not None and block is not self._ends:
            yield block
            block = block.next_free


class BlockPool:
    """All blocks of the cache.

    Args:
        num_blocks: with the null block, so at least 2.
        enable_caching: keep the content of freed blocks findable by key.

    Raises:
        ConfigError: fewer than 2 blocks.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks holds nothing",
                hint="Block 0 is a placeholder: give 2 blocks or more, or more memory.",
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self._free = FreeBlockQueue(self.blocks[1:])
        self._cached: dict[bytes, Block] = {}  # the first block registered under a key
        self._twins: dict[bytes, dict[int, Block]] = {}  # further blocks with the same content
        # Keys of the last evictions, oldest first, at most num_blocks. Its front goes in O(1); a dict's does not.
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references, cached ones included."""
        return self._free.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody references, 0 to 1."""
        return 1.0 - self._free.num_blocks / (self.num_blocks - 1)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found by key."""
        return len(self._cached) + sum(len(twins) for twins in self._twins.values())

    def free_block_ids(self) -> list[int]:
        """Ids of the free blocks in the order they would be reused. O(free blocks)."""
        return [block.block_id for block in self._free]

    def allocate(self, num_blocks: int) -> list[Block]:
        """Hand out blocks with one reference each, evicting their cached content. The caller owns them.

        Raises:
            InvariantViolation: more than are free; the caller should have looked.
        """
        if num_blocks > self._free.num_blocks:
            raise InvariantViolation(f"{num_blocks} blocks asked, {self._free.num_blocks} are free")
        popleft = self._free.popleft
        taken = []
        for _ in range(num_blocks):
            block = popleft()
            if block.key is not None:
                self._evict(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each block of a cache hit, taking it out of the free queue where it lies there."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference of each block, in the given order; hand a chain in tail first.

        A block that nobody else holds goes to the back of the queue if it is cached, to the front if not.

        Raises:
            InvariantViolation: a block that nobody holds.
        """
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count <= 0:
                raise InvariantViolation(f"block {block.block_id} was freed more often than it was handed out")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.key is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def find_cached(self, key: bytes) -> Block | None:
        """The first block that was registered under `key` and still holds it."""
        return self._cached.get(key)

    def register(self, block: Block, key: bytes) -> None:
        """Make the content of a full block findable. Blocks with equal content may coexist.

        Raises:
            InvariantViolation: the block is registered already, or is the null block.
        """
        if block.key is not None or block is self.null_block:
            raise InvariantViolation(f"block {block.block_id} cannot be cached twice, the null block never")
        block.key = key
        if key in self._cached:
            self._twins.setdefault(key, {})[block.block_id] = block
        else:
            self._cached[key] = block
            self._evicted.pop(key, None)

    def was_evicted(self, key: bytes) -> bool:
        """Whether content was cached under `key` not long ago and had to make room."""
        return key in self._evicted

    def unregister(self, block: Block) -> None:
        """Take back what `register` did: the content never came to be, or is about to be overwritten."""
        key = block.key
        if key is None:
            return
        block.key = None
        twins = self._twins.get(key)
        if self._cached[key] is not block:
            assert twins is not None
            del twins[block.block_id]
        elif twins:
            self._cached[key] = twins.pop(next(iter(twins)))
        else:
            del self._cached[key]
        if twins is not None and not twins:
            del self._twins[key]

    def _evict(self, block: Block) -> None:
        key = block.key
        assert key is not None
        self.unregister(block)
        if key not in self._cached:
            self._evicted[key] = None
            if len(self._evicted) > self.num_blocks:
                self._evicted.popitem(last=False)

    def reset_cache(self) -> bool:
        """Forget all cached content. Does nothing and returns False while any block is referenced."""
        if self._free.num_blocks != self.num_usable_blocks:
            return False
        for block in self.blocks:
            block.key = None
        self._cached.clear()
        self._twins.clear()
        self._evicted.clear()
        return True

    def check_integrity(self) -> None:
        """Verify the invariants of the pool by itself. O(num_blocks); for tests and debugging.

        Raises:
            InvariantViolation: names the first one that does not hold.
        """
        queued = list(self._free)
        ids = {block.block_id for block in queued}
        if len(queued) != self._free.num_blocks or len(ids) != len(queued):
            raise InvariantViolation("the free queue miscounts or holds a block twice")
        for block in self.blocks[1:]:
            if block.ref_count < 0 or (block.ref_count == 0) != (block.block_id in ids):
                raise InvariantViolation(f"{block} is {'' if block.block_id in ids else 'not '}in the free queue")
            if block.key is not None:
                holders = {self._cached[block.key].block_id, *self._twins.get(block.key, {})}
                if block.block_id not in holders:
                    raise InvariantViolation(f"{block} has a key that does not lead to it")
        if NULL_BLOCK_ID in ids or self.null_block.ref_count or self.null_block.key is not None:
            raise InvariantViolation("the null block was handed out, freed or cached")
        found = [*self._cached.items(), *((key, b) for key, twins in self._twins.items() for b in twins.values())]
        for key, block in found:
            if block.key != key:
                raise InvariantViolation(f"a cache key leads to {block}, which does not hold it")
        if any(key not in self._cached or not twins for key, twins in self._twins.items()):
            raise InvariantViolation("a cache key has twins but no first block, or an empty twin table")
