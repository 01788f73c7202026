"""How many users fit, and what a number of users needs: contexts with a shared prefix, set against the blocks.

Knows a finished answer (capacity.py); chooses nothing (recommend.py does). Floor 1.
"""

from dataclasses import dataclass

from kvctl.sizing.blocks import longest
from kvctl.sizing.capacity import Capacity, Limits
from kvctl.sizing.request import SizeAnswer

_LONGEST = 1 << 24  # tokens; beyond any model's context


@dataclass(frozen=True, slots=True)
class UsersFit:
    """`users` requests of `context_tokens` each (prompt, output and history), the first `shared_tokens` in common."""

    users: int
    context_tokens: int
    shared_tokens: int
    needed_blocks: int
    usable_blocks: int
    max_users: int
    fits: bool
    max_context_tokens: int  # the longest context that so many users can have


def blocks_for_users(capacity: Capacity, limits: Limits, users: int, context: int, shared: int) -> int:
    """Blocks that `users` hold together: the shared prefix once, the rest of each on its own."""
    pool = capacity.pool
    each = pool.blocks_per_request(context, limits)
    if not shared or not pool.block_tokens:
        return users * each
    common = pool.blocks_per_request(shared // pool.block_tokens * pool.block_tokens, limits) if shared else 0
    return common + users * max(1, each - common)


def users_fit(answer: SizeAnswer, users: int, context: int, shared: int = 0) -> UsersFit | None:
    """Set users against the capacity; None when there is none to set them against."""
    capacity = answer.capacity
    if capacity is None:
        return None
    limits = answer.limits
    usable = capacity.usable_blocks
    seats = answer.request.max_num_seqs  # None: the engine's default, which a flag raises
    if capacity.pool.rules.name == "ideal" or not capacity.pool.groups:
        many = int(capacity.max_concurrency * capacity.max_model_len / max(1, context - shared))
        slots = capacity.state_slots if capacity.state_slots is not None else many
        fitting = min(many, slots) if seats is None else min(many, slots, seats)
        return UsersFit(users, context, shared, 0, usable, fitting, users <= fitting, context)
    needed = blocks_for_users(capacity, limits, users, context, shared)
    most = longest(
        lambda many: blocks_for_users(capacity, limits, many, context, shared) <= usable, max(users, usable) + 1
    )
    most = most if capacity.state_slots is None else min(most, capacity.state_slots)
    most = most if seats is None else min(most, seats)
    length = longest(
        lambda tokens: blocks_for_users(capacity, limits, users, tokens, min(shared, tokens)) <= usable, _LONGEST
    )
    return UsersFit(users, context, shared, needed, usable, most, users <= most and needed <= usable, length)
