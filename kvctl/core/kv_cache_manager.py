"""Which blocks hold the tokens of which request, and which of them a new request can share.

Sits between the scheduler (requests, tokens) and the block pool (ids, references). Knows no tensors and no step
budget. Floor 0.

Every KV cache group has a block table of its own; all tables of a request have the same length. Groups with a
sliding window hold the null block where their tokens have fallen out of the window. A full block is registered in
the prefix cache when its tokens are SCHEDULED, so that a twin request of the same step already finds it (all
tokens of a step are stored before any is attended to).

Invariant: a block is referenced once per table that holds it (`check_integrity`).
"""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from kvctl.core.block_hash import BlockHasher
from kvctl.core.block_pool import Block, BlockPool
from kvctl.core.config import CacheConfig
from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.core.request import Request
from kvctl.core.step import BlockTables
from kvctl.errors import InvariantViolation


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the prefix cache has of a request: blocks per group (not yet referenced) and the tokens they hold."""

    blocks: tuple[list[Block], ...]
    num_tokens: int


class _Holding:
    """The blocks of one request."""

    __slots__ = ("num_registered", "num_released", "tables")

    def __init__(self, tables: list[list[Block]], num_registered: int) -> None:
        self.tables = tables  # one per group, all of one length
        self.num_registered = num_registered  # leading blocks that are in the prefix cache
        self.num_released = [0] * len(tables)  # leading blocks that fell out of the group's window


class KVCacheManager:
    """Block tables of all requests, drawn from one pool.

    Args:
        pool: owned by the caller, used by this manager only.
        groups: at least one; see `kv_cache_groups`.
        max_step_tokens: most tokens of one request in one step; bounds what a sliding window holds at its
            peak. None: no bound is known, a window is counted like full attention.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: CacheConfig,
        groups: Sequence[KVCacheGroup],
        *,
        max_step_tokens: int | None = None,
    ) -> None:
        if not groups:
            raise InvariantViolation("a KV cache without groups")
        self.pool = pool
        self.block_size = config.block_size
        self.groups = tuple(groups)
        self._caching = config.enable_prefix_caching and pool.enable_caching
        self._hasher = BlockHasher(config.block_size, config.prefix_caching_hash_algo)
        self._key_suffixes = [index.to_bytes(4, "big") for index in range(len(groups))]
        self._has_windows = any(group.window_tokens is not None for group in groups)
        self._max_step_tokens = max_step_tokens
        self._holdings: dict[str, _Holding] = {}

    # ---- how much a request needs ----

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks, over all groups, that a request of `num_tokens` holds at a time."""
        full = -(-num_tokens // self.block_size)
        total = 0
        for group in self.groups:
            if group.window_tokens is None or self._max_step_tokens is None:
                total += full
            else:
                span = min(group.window_tokens - 1 + self._max_step_tokens, num_tokens)
                total += min(full, -(-span // self.block_size) + 1)
        return total

    def capacity_tokens(self, limit_tokens: int) -> int:
        """The longest request, up to `limit_tokens`, that fits the whole cache alone. O(log limit)."""
        usable = self.pool.num_usable_blocks
        low, high = 0, limit_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle) <= usable:
                low = middle
            else:
                high = middle - 1
        return low

    # ---- the prefix cache ----

    def _reads_cache(self, request: Request) -> bool:
        # Prompt logprobs need every prompt position computed, so such a request writes the cache only.
        return self._caching and request.sampling_params.prompt_logprobs is None

    def find_cached_prefix(self, request: Request) -> CachedPrefix:
        """Look up the longest cached prefix. Its last token is never part of it: that one must be computed.

        References nothing; the answer holds until the next allocation. O(full blocks of the request).
        """
        num_blocks = (request.num_tokens - 1) // self.block_size if self._reads_cache(request) else 0
        if num_blocks <= 0:
            return CachedPrefix(tuple([] for _ in self.groups), 0)
        self._hasher.extend(request)
        hashes = request.block_hashes[:num_blocks]
        while True:  # a shorter hit of one group shortens those of the others; ends, since it only shrinks
            runs = []
            for index in range(len(self.groups)):
                runs.append(self._cached_run(index, hashes))
                hashes = hashes[: len(runs[-1])]
            if len(runs[0]) == len(hashes) and all(len(run) == len(hashes) for run in runs):
                return CachedPrefix(tuple(runs), len(hashes) * self.block_size)

    def prefix_may_have_grown(self, request: Request, num_cached_tokens: int) -> bool:
        """Whether more may be cached than the `num_cached_tokens` found earlier. O(1); may say yes in vain."""
        if len(self.groups) > 1 or self._has_windows:
            return True
        index = num_cached_tokens // self.block_size
        if not self._reads_cache(request) or index >= (request.num_tokens - 1) // self.block_size:
            return False
        return self.pool.find_cached(request.block_hashes[index] + self._key_suffixes[0]) is not None

    def _cached_run(self, group_index: int, hashes: Sequence[bytes]) -> list[Block]:
        """The longest usable hit within `hashes` for one group: all of it, or the window at its end."""
        find, suffix = self.pool.find_cached, self._key_suffixes[group_index]
        window = self.groups[group_index].window_tokens
        run: list[Block] = []
        if window is None:
            for block_hash in hashes:
                block = find(block_hash + suffix)
                if block is None:
                    break
                run.append(block)
            return run
        # From the right: the next token looks back over window - 1 others, only their blocks must be there.
        needed = -(-(window - 1) // self.block_size)
        run = [self.pool.null_block] * len(hashes)
        in_a_row = 0
        if needed == 0:
            return run
        for index in range(len(hashes) - 1, -1, -1):
            block = find(hashes[index] + suffix)
            if block is None:
                in_a_row = 0
                continue
            run[index] = block
            in_a_row += 1
            if in_a_row == needed:
                return run[: index + needed]
        return run[:in_a_row]  # a leading run, shorter than the window

    def miss_reasons(self, request: Request, prefix: CachedPrefix) -> dict[str, int]:
        """Why the tokens beyond `prefix` were not found: reason -> tokens. Reasons:

        `disabled`, `prompt_logprobs` (such requests do not read the cache), `partial_block` (the tail that fills
        no block, and the last block of a fully cached prompt), `evicted` (was cached, had to make room), `new`.
        """
        missing = request.num_tokens - prefix.num_tokens
        if not self._caching:
            return {"disabled": missing}
        if not self._reads_cache(request):
            return {"prompt_logprobs": missing}
        num_blocks = (request.num_tokens - 1) // self.block_size
        tail = request.num_tokens - num_blocks * self.block_size
        reasons = {"partial_block": tail}
        if missing > tail:
            first = request.block_hashes[prefix.num_tokens // self.block_size]
            evicted = any(self.pool.was_evicted(first + suffix) for suffix in self._key_suffixes)
            reasons["evicted" if evicted else "new"] = missing - tail
        return reasons

    # ---- allocation ----

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        prefix: CachedPrefix | None = None,
        *,
        reserve_tokens: int = 0,
        watermark_blocks: int = 0,
    ) -> BlockTables | None:
        """Make room for the request's next `num_new_tokens` tokens.

        Args:
            prefix: for a request without blocks: what `find_cached_prefix` just found; its blocks are referenced.
            reserve_tokens: refuse unless a sequence of this many tokens would have room now.
            watermark_blocks: refuse unless this many blocks stay free.

        Returns:
            The new block ids per group (without the prefix's), or None if they do not fit now: nothing changed,
            except that blocks outside the window may have been released.
        """
        holding = self._holdings.get(request.request_id)
        if holding is None:
            holding = self._admit(request, num_new_tokens, prefix, reserve_tokens, watermark_blocks)
            if holding is None:
                return None
            computed = prefix.num_tokens if prefix else 0
        else:
            computed = request.num_computed_tokens
            if self._has_windows:
                self._release_outside_window(holding, computed)
        total = computed + num_new_tokens
        tables = holding.tables
        missing = -(-total // self.block_size) - len(tables[0])
        if missing > 0:
            if missing * len(tables) + watermark_blocks > self.pool.num_free_blocks:
                return None
            new_ids = []
            for table in tables:
                blocks = self.pool.allocate(missing)
                table += blocks
                new_ids.append([block.block_id for block in blocks])
            request.allocated_tokens = len(tables[0]) * self.block_size
        else:
            new_ids = [[] for _ in tables]
        if self._caching:
            self._register_full_blocks(request, holding, min(total, len(request.token_ids)))
        return tuple(new_ids)

    def _admit(
        self, request: Request, num_new_tokens: int, prefix: CachedPrefix | None, reserve: int, watermark: int
    ) -> _Holding | None:
        """Start a holding with the prefix's blocks if all that is asked for fits, else None."""
        hits = [list(blocks) for blocks in prefix.blocks] if prefix else [[] for _ in self.groups]
        total = (prefix.num_tokens if prefix else 0) + num_new_tokens
        null = self.pool.null_block
        real_hits = [block for blocks in hits for block in blocks if block is not null]
        # Hits that nobody references lie in the free queue: taking them uses them up like new ones.
        revived = sum(block.ref_count == 0 for block in real_hits)
        for_chunk = sum(-(-total // self.block_size) - len(blocks) for blocks in hits)
        for_all = max(0, self.blocks_for(reserve) - len(real_hits))
        if max(for_chunk, for_all) + revived + watermark > self.pool.num_free_blocks:
            return None
        for blocks in hits:
            self.pool.touch(blocks)
        holding = self._holdings[request.request_id] = _Holding(hits, len(hits[0]))
        holding.num_released = [sum(block is null for block in blocks) for blocks in hits]
        request.allocated_tokens = len(hits[0]) * self.block_size
        return holding

    def _release_outside_window(self, holding: _Holding, num_computed_tokens: int) -> None:
        """Free the blocks that no coming token can see; the next one stands at `num_computed_tokens`."""
        null = self.pool.null_block
        for index, group in enumerate(self.groups):
            if group.window_tokens is None:
                continue
            first_visible = max(0, num_computed_tokens - group.window_tokens + 1) // self.block_size
            released = holding.num_released[index]
            if first_visible > released:
                table = holding.tables[index]
                self.pool.free(reversed(table[released:first_visible]))
                table[released:first_visible] = [null] * (first_visible - released)
                holding.num_released[index] = first_visible

    def _register_full_blocks(self, request: Request, holding: _Holding, num_tokens: int) -> None:
        num_full = num_tokens // self.block_size
        if num_full <= holding.num_registered:
            return
        self._hasher.extend(request)
        null = self.pool.null_block
        for index in range(holding.num_registered, num_full):
            block_hash = request.block_hashes[index]
            for table, suffix in zip(holding.tables, self._key_suffixes, strict=True):
                if table[index] is not null:
                    self.pool.register(table[index], block_hash + suffix)
        holding.num_registered = num_full

    def unregister_uncomputed(self, request: Request, num_computed_tokens: int) -> None:
        """Take the blocks beyond the computed tokens out of the prefix cache: their step will not run."""
        holding = self._holdings[request.request_id]
        num_full = num_computed_tokens // self.block_size
        for index in range(num_full, holding.num_registered):
            for table in holding.tables:
                self.pool.unregister(table[index])
        holding.num_registered = min(num_full, holding.num_registered)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, tails first. A request without blocks is fine.

        Tokens that became known after they were scheduled may have filled a block: it stays findable too.
        """
        holding = self._holdings.pop(request.request_id, None)
        if holding is not None:
            if self._caching:
                known = min(request.num_computed_tokens, len(request.token_ids))
                self._register_full_blocks(request, holding, known)
            for table in holding.tables:
                self.pool.free(reversed(table))
        request.allocated_tokens = 0

    def block_tables(self, request: Request) -> BlockTables:
        """Block ids per group, copied; the null block where a window has passed."""
        return tuple([block.block_id for block in table] for table in self._holdings[request.request_id].tables)

    @property
    def holders(self) -> Set[str]:
        """Ids of the requests that have blocks."""
        return self._holdings.keys()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while any request holds blocks."""
        return self.pool.reset_cache()

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return self.pool.usage

    def check_integrity(self) -> None:
        """Verify that references and tables agree. O(blocks); for tests and debugging.

        Raises:
            InvariantViolation: names the first thing that does not hold.
        """
        self.pool.check_integrity()
        owners: Counter[int] = Counter()
        for request_id, holding in self._holdings.items():
            if len({len(table) for table in holding.tables}) != 1:
                raise InvariantViolation(f"the block tables of {request_id} differ in length")
            ids = [b.block_id for table in holding.tables for b in table if b is not self.pool.null_block]
            if len(ids) != len(set(ids)):
                raise InvariantViolation(f"{request_id} holds a block in two places")
            owners.update(ids)
        for block in self.pool.blocks[1:]:
            if block.ref_count != owners[block.block_id]:
                raise InvariantViolation(f"{block} has {owners[block.block_id]} owners")
