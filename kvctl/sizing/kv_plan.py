"""How many KV blocks there are and how many requests they hold: the arithmetic that `serve` and `size` share.

Knows bytes and tokens only: no device, no file, no tensors. A block holds `block_size` tokens of `layers_per_block`
layers (see core/kv_cache_groups). Floor 1.
Source of the rules: vLLM's kv_cache_utils (concurrency counts the null block, the fit check does not). The formulas
are in blocks.py, which `size` uses too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.errors import OutOfMemory
from kvctl.sizing.blocks import blocks_of, concurrency, concurrency_in_tokens, longest, window_blocks
from kvctl.units import format_bytes, format_count

_ADVICE = "Lower --max-model-len, raise --kv-cache-memory-bytes or --gpu-memory-utilization, or use a smaller model."


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of the cache. `page_bytes`: keys and values of one layer in one block."""

    groups: tuple[KVCacheGroup, ...]
    block_size: int  # tokens
    page_bytes: int
    in_flight_tokens: int  # most tokens that one step may compute, times the steps that overlap

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool: the largest group's layers, as all groups draw from one pool."""
        return self.page_bytes * max(len(group.layer_indices) for group in self.groups)

    def blocks_per_request(self, num_tokens: int) -> int:
        """Most blocks that one request of `num_tokens` holds at a time, over all groups."""
        return sum(
            blocks_of(num_tokens, self.block_size)
            if group.window_tokens is None
            else window_blocks(num_tokens, group.window_tokens, self.in_flight_tokens, self.block_size)
            for group in self.groups
        )


@dataclass(frozen=True, slots=True)
class KVPlan:
    """What a number of blocks means for requests of the longest allowed length."""

    layout: KVLayout
    num_blocks: int  # with the null block
    max_model_len: int

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len tokens that fit at once, as vLLM prints it."""
        return concurrency(self.num_blocks, self.layout.blocks_per_request(self.max_model_len))

    @property
    def capacity_tokens(self) -> int:
        """Tokens that those requests hold, as vLLM prints it (not num_blocks * block_size if some layers slide)."""
        return concurrency_in_tokens(
            self.num_blocks, self.layout.blocks_per_request(self.max_model_len), self.max_model_len
        )

    def describe(self, cache_name: str = "KV cache") -> str:
        """vLLM's log line, word for word; on CUDA `cache_name` is 'GPU KV cache'."""
        return (
            f"{cache_name} size: {format_count(self.capacity_tokens)} tokens, Maximum concurrency for "
            f"{format_count(self.max_model_len)} tokens per request: {self.max_concurrency:.2f}x"
        )


def longest_fitting_request(layout: KVLayout, num_blocks: int, max_model_len: int) -> int:
    """Most tokens of one request that `num_blocks` hold beside the null block; 0 if not even one token."""
    return longest(lambda tokens: layout.blocks_per_request(tokens) <= num_blocks - 1, max_model_len)


def plan_kv_cache(
    layout: KVLayout, max_model_len: int, *, available_bytes: int, num_blocks_override: int | None = None
) -> KVPlan:
    """Cut the available memory into blocks; `num_blocks_override` replaces that count.

    Raises:
        OutOfMemory: one request of max_model_len tokens does not fit beside the null block.
    """
    num_blocks = available_bytes // layout.block_bytes if num_blocks_override is None else num_blocks_override
    needed = layout.blocks_per_request(max_model_len) + 1
    if num_blocks < needed:
        fits = longest_fitting_request(layout, num_blocks, max_model_len)
        available = num_blocks * layout.block_bytes if num_blocks_override is not None else available_bytes
        shorter = f"; {format_count(fits)} tokens would fit" if fits else ""
        raise OutOfMemory(
            f"one request of {format_count(max_model_len)} tokens needs {format_bytes(needed * layout.block_bytes)} of "
            f"KV cache ({format_count(needed)} blocks), available are {format_bytes(available)} "
            f"({format_count(num_blocks)} blocks){shorter}",
            hint=_ADVICE,
        )
    return KVPlan(layout, num_blocks, max_model_len)


def blocks_worth_having(layout: KVLayout, max_model_len: int, max_num_seqs: int) -> int:
    """Blocks beyond which no allowed load could use more, the null block included."""
    return max_num_seqs * layout.blocks_per_request(max_model_len) + 1


def padding_note(groups: Sequence[KVCacheGroup]) -> str | None:
    """A line about groups with fewer layers than a block has room for; None if there are none."""
    size = max(len(group.layer_indices) for group in groups)
    held = sum(len(group.layer_indices) for group in groups)
    waste = 1 - held / (size * len(groups))
    return f"KV blocks have room for {size} layers, some groups have fewer: {waste:.1%} stays empty" if waste else None
