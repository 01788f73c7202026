"""What a given amount of KV memory holds: blocks, tokens, requests, longest context, by an engine's own rule.

Knows specs (bytes per layer) and rules (switches); no GPU, no weights. Pure arithmetic on integers. `serve` counts with
kv_plan.py; both use the formulas of blocks.py, and for the models it serves they agree (tested). Floor 1.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvctl.core.kv_cache_groups import layers_per_block
from kvctl.errors import ModelNotSupported
from kvctl.model.kv_cache_spec import KVCacheSpec, marginal_bytes_per_token
from kvctl.model.layer_shape import LayerKind
from kvctl.sizing.blocks import blocks_of, chunk_blocks, concurrency, concurrency_in_tokens, longest, window_blocks
from kvctl.sizing.compressed_pool import pack_compressed
from kvctl.sizing.engine_rules import EngineRules, keeps_every_state, mamba_blocks_per_request
from kvctl.sizing.pool_group import PoolGroup

STATE_ALIGN = 16  # tokens that a block grown to hold a state is a multiple of, where no kernel wants more
_CELLS_MULTIPLE = 256  # llama.cpp rounds a window's cells up to this
_UNBOUNDED = (LayerKind.FULL, LayerKind.MLA)


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests may look like; all in tokens but `max_num_seqs`."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int = 256
    prefix_caching: bool | None = None
    context_parallel: int = 1  # ranks that share the tokens of a request (decode context parallelism)


@dataclass(frozen=True, slots=True)
class Pool:
    """The groups of a model under an engine, and the block that all of them share.

    `separate_state_bytes`: recurrent bytes per request that the engine keeps outside the pool; `separate_windows`:
    windowed layers that llama.cpp gives a small cache of a fixed number of cells.
    """

    rules: EngineRules
    groups: tuple[PoolGroup, ...]
    block_bytes: int
    block_tokens: int  # of the group with the most tokens in reach
    fit_block_bytes: int = 0  # what the fit check takes a block for, where that is not `block_bytes`
    separate_state_bytes: int = 0
    separate_windows: tuple[tuple[int, int], ...] = ()  # (window, bytes per token) of layers with a cache of their own
    notes: tuple[str, ...] = ()

    def blocks_per_request(self, num_tokens: int, limits: Limits) -> int:
        """Most blocks that one request of `num_tokens` holds at a time, over all groups."""
        return sum(_group_blocks(group, num_tokens, limits, self.rules) for group in self.groups)

    def bytes_per_request(self, num_tokens: int, limits: Limits) -> int:
        """What the engine's fit check sets against the memory: whole blocks, or before vLLM 0.14 each layer's pages."""
        total = 0
        for group in self.groups:
            blocks, layers = _group_blocks(group, num_tokens, limits, self.rules), len(group.layer_indices)
            if self.rules.fit_counts_groups:
                total += blocks * (self.fit_block_bytes or self.block_bytes)
            else:
                total += blocks * group.page_bytes * layers // (layers + group.padding_layers)
        return total


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the memory holds. `usable_blocks` leaves the null block out; `max_context_tokens` is one request alone."""

    pool: Pool
    kv_bytes: int
    num_blocks: int
    usable_blocks: int
    kv_tokens: int
    max_model_len: int
    max_concurrency: float
    max_context_tokens: int
    fits: bool
    needed_bytes: int  # one request of max_model_len
    state_slots: int | None = None  # requests whose recurrent state fits, where that is kept apart


def _group_blocks(group: PoolGroup, num_tokens: int, limits: Limits, rules: EngineRules) -> int:
    if group.kind is LayerKind.STATE:
        if group.share_tokens and keeps_every_state(rules, limits.prefix_caching, group.mixer):
            return blocks_of(num_tokens, group.share_tokens)
        return mamba_blocks_per_request(rules, limits.prefix_caching)
    size = group.block_tokens
    if group.kind is LayerKind.CROSS:  # sized for the encoder's batch budget, not for one request's source
        return blocks_of(max(limits.max_num_batched_tokens, group.source_tokens or 0), size)
    if group.window_tokens is None:
        return blocks_of(blocks_of(num_tokens, limits.context_parallel), size)
    in_flight = limits.max_num_batched_tokens * rules.steps_in_flight
    count = chunk_blocks if group.kind is LayerKind.CHUNKED else window_blocks
    return count(num_tokens, group.window_tokens, in_flight, size)


def priced(spec: KVCacheSpec, rules: EngineRules) -> KVCacheSpec:
    """The spec as the engine allocates it: windows that it does not use are dropped."""
    keeps_window = rules.groups_layers and not (spec.kind is LayerKind.CHUNKED and rules.chunked_as_full)
    if spec.kind in (LayerKind.SLIDING, LayerKind.CHUNKED) and not keeps_window:
        return KVCacheSpec(spec.layer_index, LayerKind.FULL, spec.bytes_per_token, indexer_bytes=spec.indexer_bytes)
    if spec.kind is LayerKind.CROSS and not rules.groups_layers:  # V0 gave cross attention a full table too
        return KVCacheSpec(spec.layer_index, LayerKind.FULL, spec.bytes_per_token)
    return spec


def build_pool(
    specs: Sequence[KVCacheSpec], rules: EngineRules, block_size: int | None, *, state_align: int = STATE_ALIGN
) -> Pool:
    """Group the layers and find the block that all groups share; a block that holds a state is a multiple of
    `state_align` tokens.

    Source: vLLM's kv_cache_utils: one kind -> one group; else blocks of equal bytes (the smaller page gets more
    tokens, a recurrent page is padded to the attention page, whose block grows until a state fits), and groups of
    equal layer counts (core.kv_cache_groups.layers_per_block). Checked against the logs in tests/data/sizing.

    Raises:
        ModelNotSupported: the engine's rule for this model is not known.
    """
    if rules.name == "ideal":
        return _ideal_pool(specs, rules)
    kept = [priced(spec, rules) for spec in specs]
    if any(s.kind is LayerKind.COMPRESSED for s in kept):
        packed = pack_compressed(kept, rules)
        pool = _pool(rules, packed.groups, extra_notes=packed.notes)
        return replace(pool, block_bytes=packed.block_bytes, fit_block_bytes=packed.fit_block_bytes)
    attention = [s for s in kept if s.kind is not LayerKind.STATE]
    states = [s for s in kept if s.kind is LayerKind.STATE]
    apart = bool(states) and (not rules.groups_layers or rules.name == "llama.cpp")
    if any(s.state_bytes is None for s in states) and not (apart and attention):
        raise ModelNotSupported(
            "cannot tell: this config leaves out the sizes of its recurrent state",
            hint="Give the model's full config.json.",
        )
    size = block_size or rules.block_size
    windows: tuple[tuple[int, int], ...] = ()
    if rules.name == "llama.cpp" and any(s.window_tokens is None for s in attention):
        windows = tuple((s.window_tokens, s.bytes_per_token) for s in attention if s.window_tokens is not None)
        attention = [s for s in attention if s.window_tokens is None]
    if windows and not apart:
        return replace(_pool(rules, _uniform(attention, size)), separate_windows=windows)
    if apart:
        unknown = "The recurrent state's size is not in this config: it is not counted."
        notes = [unknown] if any(s.state_bytes is None for s in states) else []
        return _pool(rules, _uniform(attention, size), sum(s.state_bytes or 0 for s in states), notes)
    kinds = {None if s.kind in _UNBOUNDED else (s.kind, s.window_tokens) for s in attention}
    if len(kinds) <= 1 and not states:
        return _pool(rules, _uniform(attention, size))
    return _pool(rules, _hybrid(attention, states, size, state_align))


def _ideal_pool(specs: Sequence[KVCacheSpec], rules: EngineRules) -> Pool:
    """One token a block, at its ideal cost; windows and states are counted per request (request.py)."""
    indices = tuple(s.layer_index for s in specs)
    return _pool(rules, [PoolGroup(LayerKind.FULL, indices, 1, marginal_bytes_per_token(specs))] if specs else [])


def _uniform(attention: Sequence[KVCacheSpec], size: int) -> list[PoolGroup]:
    if not attention:
        return []
    return [
        PoolGroup(
            attention[0].kind,
            tuple(s.layer_index for s in attention),
            size,
            size * sum(s.bytes_per_token for s in attention),
            attention[0].window_tokens,
            attention[0].source_tokens,
        )
    ]


def _hybrid(
    attention: Sequence[KVCacheSpec], states: Sequence[KVCacheSpec], size: int, state_align: int
) -> list[PoolGroup]:
    buckets: dict[tuple[LayerKind, int | None, int], list[KVCacheSpec]] = defaultdict(list)
    for spec in [*attention, *states]:
        buckets[spec.kind, spec.window_tokens, spec.bytes_per_token].append(spec)
    if states and attention:  # the attention block grows until one state fits into one layer's page
        smallest = min(s.bytes_per_token for s in attention)
        largest_state = max(s.state_bytes or 0 for s in states)
        size = max(size, state_align * -(-largest_state // (state_align * smallest)))
    page = max([size * s.bytes_per_token for s in attention] + [s.state_bytes or 0 for s in states if not attention])
    per_block = layers_per_block([len(layers) for layers in buckets.values()])
    groups = []
    share = size if attention and states else 0
    for (kind, window, token_bytes), layers in sorted(buckets.items(), key=lambda item: item[0][0] not in _UNBOUNDED):
        count = -(-len(layers) // per_block)
        tokens = 0
        if kind is not LayerKind.STATE:
            own = size * token_bytes
            tokens = size * (page // own) if page % own == 0 else size  # else the page is padded
        for i in range(count):
            indices = tuple(s.layer_index for s in layers[i::count])
            groups.append(
                PoolGroup(
                    kind,
                    indices,
                    tokens,
                    page * per_block,
                    window,
                    layers[0].source_tokens,
                    per_block - len(indices),
                    layers[0].mixer,
                    share,
                )
            )
    return groups


def _pool(
    rules: EngineRules, groups: Sequence[PoolGroup], separate_state_bytes: int = 0, extra_notes: Sequence[str] = ()
) -> Pool:
    notes = [*extra_notes]
    if groups:
        padding, held = sum(g.padding_layers for g in groups), sum(len(g.layer_indices) for g in groups)
        if padding:
            notes.append(f"{padding} padding layers: {padding / (padding + held):.1%} of the KV cache stays empty.")
    return Pool(
        rules=rules,
        groups=tuple(groups),
        block_bytes=max((g.page_bytes for g in groups), default=0),
        block_tokens=max((g.block_tokens for g in groups if g.window_tokens is None), default=0)
        or max((g.block_tokens for g in groups), default=0),
        separate_state_bytes=separate_state_bytes,
        notes=tuple(notes),
    )


def printed_tokens(pool: Pool, num_blocks: int, limits: Limits) -> int:
    """The capacity in tokens as the engine's log prints it."""
    if not pool.groups or num_blocks <= 0:
        return 0
    if pool.rules.tokens_are_concurrency:
        each = pool.blocks_per_request(limits.max_model_len, limits)
        return concurrency_in_tokens(num_blocks, each, limits.max_model_len)
    smallest = min(g.block_tokens or pool.block_tokens for g in pool.groups)
    return num_blocks // len(pool.groups) * smallest * limits.context_parallel


def capacity(
    pool: Pool,
    kv_bytes: int,
    limits: Limits,
    *,
    longest_tokens: int,
    num_blocks: int | None = None,
    holds_states: bool = False,
) -> Capacity:
    """Cut `kv_bytes` into blocks and say what they hold; `num_blocks` overrides the count.

    `longest_tokens` bounds the search for the longest request (the model's own limit). `holds_states`: recurrent states
    that an engine keeps outside its pool come out of these bytes too; else the bytes are the keys' and values' alone,
    as engines print them.
    """
    slots = None
    fixed = window_cells_bytes(pool, limits)
    kv_bytes -= fixed
    if pool.separate_state_bytes:
        kv_bytes, slots = _set_states_apart(pool, kv_bytes, limits, inside=holds_states)
    blocks = num_blocks if num_blocks is not None else max(0, kv_bytes) // pool.block_bytes if pool.block_bytes else 0
    usable = max(0, blocks - 1) if pool.rules.name in ("vllm", "kvctl") and not pool.rules.is_v0 else blocks
    room = kv_bytes if num_blocks is None else num_blocks * pool.block_bytes
    room -= pool.block_bytes if pool.rules.reserves_null_block else 0
    at_once = concurrency(blocks, pool.blocks_per_request(limits.max_model_len, limits))
    if pool.rules.counts_part_blocks and pool.groups:
        at_once = printed_tokens(pool, blocks, limits) / limits.max_model_len
    if not pool.groups and pool.separate_state_bytes:  # attention-free: a request costs its state alone
        at_once = float(slots or 0)
    needed = pool.bytes_per_request(limits.max_model_len, limits)
    most = longest_tokens
    if pool.groups:
        most = longest(lambda tokens: pool.bytes_per_request(tokens, limits) <= room, longest_tokens)
    return Capacity(
        pool=pool,
        kv_bytes=kv_bytes,
        num_blocks=blocks,
        usable_blocks=usable,
        kv_tokens=printed_tokens(pool, blocks, limits),
        max_model_len=limits.max_model_len,
        max_concurrency=at_once if slots is None else min(at_once, float(slots)),
        max_context_tokens=most,
        fits=(needed <= room or not pool.groups) and (slots is None or slots >= 1),
        needed_bytes=needed + fixed + (pool.separate_state_bytes if holds_states else 0),
        state_slots=slots,
    )


def window_cells_bytes(pool: Pool, limits: Limits) -> int:
    """Bytes of llama.cpp's caches of windowed layers: a window per sequence and one batch, rounded up.

    Source: llama_kv_cache_iswa (n_swa * n_seq_max + n_ubatch, padded to 256); gpt-oss prints 1280 cells.
    """
    total = 0
    for window, token_bytes in pool.separate_windows:
        cells = window * limits.max_num_seqs + limits.max_num_batched_tokens
        cells = min(-(-cells // _CELLS_MULTIPLE) * _CELLS_MULTIPLE, limits.max_model_len * limits.max_num_seqs)
        total += cells * token_bytes
    return total


def _set_states_apart(pool: Pool, kv_bytes: int, limits: Limits, *, inside: bool) -> tuple[int, int]:
    """Memory left for attention, and the requests whose state fits.

    SGLang gives states 0.9 parts to 1 part of attention (mamba_full_memory_ratio; log sglang-nemotron-vl-tp4) and
    keeps one slot more than it counts; the others set aside one state per allowed request.
    """
    each = pool.separate_state_bytes
    if not pool.groups:
        return kv_bytes, max(0, kv_bytes) // each
    if pool.rules.name == "sglang":
        share = kv_bytes * 9 // (19 if inside else 10)
        return kv_bytes - (share if inside else 0), max(0, share // each - 1)
    if not inside:
        return kv_bytes, limits.max_num_seqs
    slots = min(limits.max_num_seqs, max(0, kv_bytes) // each)
    return kv_bytes - slots * each, slots
