"""Counting blocks: the few formulas that `serve` (kv_plan.py) and `size` (capacity.py) share, each in one place.

Knows tokens and blocks only: no bytes, no engine, no model. Floor 1.
"""

from collections.abc import Callable


def blocks_of(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_tokens)


def window_blocks(num_tokens: int, window_tokens: int, in_flight_tokens: int, block_tokens: int) -> int:
    """Most blocks that a sliding layer holds: its window and the tokens under way, and one block more because a window
    may begin inside a block. Source: vLLM's SlidingWindowSpec; checked against logs of Gemma 3 and EXAONE 4.
    """
    return blocks_of(min(window_tokens - 1 + in_flight_tokens, num_tokens), block_tokens) + 1


def chunk_blocks(num_tokens: int, chunk_tokens: int, in_flight_tokens: int, block_tokens: int) -> int:
    """Most blocks that a chunked layer holds; a chunk begins with a block. Source: vLLM's ChunkedLocalAttentionSpec."""
    return blocks_of(min(chunk_tokens + in_flight_tokens, num_tokens), block_tokens)


def concurrency(num_blocks: int, blocks_per_request: int) -> float:
    """Requests that fit at once, as vLLM prints it: the null block counts."""
    return num_blocks / blocks_per_request if blocks_per_request else 0.0


def concurrency_in_tokens(num_blocks: int, blocks_per_request: int, max_model_len: int) -> int:
    """Tokens that those requests hold; on a hybrid not num_blocks * block_size."""
    return int(concurrency(num_blocks, blocks_per_request) * max_model_len)


def longest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, by halving; 0 if not even 1. Whatever fits, less fits too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
