"""How vLLM packs DeepSeek V4: compressed caches, their windows and their compressors' states in one pool of blocks.

Knows specs and rules; no memory, no requests (capacity.py counts those). Floor 1.
Source: vLLM's models/deepseek_v4 and kv_cache_utils, and what its changes and reports print: issue 44376 (6.66 GiB for
30,000 tokens at 0.22, 13,528 tokens in 5.44 GiB), #44454 (+1.16 % of blocks), #48993 (1,473,408 bytes a block for
V4-Pro before it), issue 54703 (the five groups of V4-Flash, 1,002,240 bytes the largest); see tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.errors import ModelNotSupported
from kvctl.model.kv_cache_spec import DS_V4_ENTRY_BYTES, KVCacheSpec
from kvctl.model.layer_shape import LayerKind
from kvctl.sizing.engine_rules import EngineRules
from kvctl.sizing.pool_group import PoolGroup

_BLOCK_TOKENS = 256  # FlashMLA's kernels take no other
_WINDOW_BLOCK_TOKENS = 64
_PAGE_ALIGN = 576  # bytes
_INDEXER_BYTES = 132  # 128 FP8 and a float32 scale
_LATENT_DIM, _INDEXER_DIM = 512, 128
_FINE, _COARSE = 4, 128  # compression ratios; only the fine layers have an indexer
_STATE_BLOCK_TOKENS = {_FINE: 4, _COARSE: 8}
_STATE_WINDOW_TOKENS = {_FINE: 8, _COARSE: 128}  # the fine compressor's parts overlap: two of them stay in reach
_DRAFT_NOTE = "Layers of a draft (MTP, DSpark) are not counted: each adds a window, and some a larger block."
_KERNEL_NOTE = "Pages as FlashMLA lays them out; FlashInfer's on Blackwell are up to 11 % smaller."


@dataclass(frozen=True, slots=True)
class CompressedPool:
    """The groups, the bytes of a block, and the bytes that the fit check takes a block for."""

    groups: tuple[PoolGroup, ...]
    block_bytes: int
    fit_block_bytes: int
    notes: tuple[str, ...]


def pack_compressed(specs: Sequence[KVCacheSpec], rules: EngineRules) -> CompressedPool:
    """Five groups or so: all compressed caches, the windows in parts of about equal size, and the two kinds of state.

    Raises:
        ModelNotSupported: another engine, number format or shape than vLLM's layout is known for.
    """
    fine = [s.layer_index for s in specs if s.compress_ratio == _FINE]
    coarse = [s.layer_index for s in specs if s.compress_ratio == _COARSE]
    windows = [s for s in specs if s.window_tokens is not None]
    is_known = rules.name == "vllm" and fine and coarse and len(windows) == len(specs)
    is_known = is_known and all(s.bytes_per_token - s.indexer_bytes == DS_V4_ENTRY_BYTES for s in specs)
    is_known = is_known and all(
        s.indexer_bytes == (_INDEXER_BYTES if s.compress_ratio == _FINE else 0)
        and s.compress_ratio in (0, _FINE, _COARSE)
        for s in specs
    )
    if not is_known:
        raise ModelNotSupported(
            "cannot tell: how this engine packs DeepSeek V4's compressed layers is not pinned by any log",
            hint="vLLM with an FP8 cache is known. Its ideal bytes per token are shown; leave out the memory options, "
            "or use --engine ideal.",
        )
    fine_page, indexer_page, coarse_page = (
        _page(_BLOCK_TOKENS // ratio, size)
        for ratio, size in ((_FINE, DS_V4_ENTRY_BYTES), (_FINE, _INDEXER_BYTES), (_COARSE, DS_V4_ENTRY_BYTES))
    )
    window_page = _page(_WINDOW_BLOCK_TOKENS, DS_V4_ENTRY_BYTES)
    rows = max(len(fine), len(coarse))  # layers of each page size side by side
    wide = _least_padding([rows, len(windows), len(fine), len(coarse)], rows)
    parts = [windows[i :: -(-len(windows) // wide)] for i in range(-(-len(windows) // wide))]
    rows = max(rows, *map(len, parts))
    groups = [
        PoolGroup(
            LayerKind.COMPRESSED,
            tuple(sorted(fine + coarse)),
            _BLOCK_TOKENS,
            len(fine) * (fine_page + indexer_page) + len(coarse) * coarse_page,
        )
    ]
    groups += [
        PoolGroup(
            LayerKind.SLIDING,
            tuple(s.layer_index for s in part),
            _WINDOW_BLOCK_TOKENS,
            len(part) * window_page,
            part[0].window_tokens,
        )
        for part in parts
    ]
    for ratio, layers in ((_FINE, fine), (_COARSE, coarse)):
        page = _state_page(ratio, _LATENT_DIM) + (_state_page(ratio, _INDEXER_DIM) if ratio == _FINE else 0)
        size, window = _STATE_BLOCK_TOKENS[ratio], _STATE_WINDOW_TOKENS[ratio]
        groups.append(PoolGroup(LayerKind.SLIDING, tuple(layers), size, len(layers) * page, window))
    whole_rows = rows * (fine_page + indexer_page + coarse_page)
    block = {
        "rows": whole_rows,
        "columns": rows * fine_page + len(fine) * indexer_page + len(coarse) * coarse_page,
        "dense": max(group.page_bytes for group in groups),
    }[rules.compressed_packing]
    return CompressedPool(tuple(groups), block, whole_rows, (_DRAFT_NOTE, _KERNEL_NOTE))


def _page(entries: int, entry_bytes: int) -> int:
    return -(-entries * entry_bytes // _PAGE_ALIGN) * _PAGE_ALIGN


def _state_page(ratio: int, dim: int) -> int:
    """A block of a compressor's state: keys and scores in float32, twice where its parts overlap."""
    overlap = 2 if ratio == _FINE else 1
    return _page(_STATE_BLOCK_TOKENS[ratio], 2 * overlap * dim * 4)


def _least_padding(counts: Sequence[int], least: int) -> int:
    """The group size from `least` up that leaves the fewest places empty; of equals the largest."""
    return min(range(least, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))
