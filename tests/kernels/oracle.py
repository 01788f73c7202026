"""Float64 numpy answers that the kernels are held against, and batches of pages to ask them about."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvctl_kernels.metadata import AttentionMetadata

# Relative L2 error allowed, per dtype: a few units in the last place of the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def relative_error(got: torch.Tensor, want: np.ndarray) -> float:
    difference = got.double().numpy() - want
    return float(np.linalg.norm(difference) / max(np.linalg.norm(want), 1e-30))


@dataclass
class PagedBatch:
    """Requests over shuffled pages; pages nobody owns (and the null block, and the rest of last pages) hold NaN."""

    query: torch.Tensor  # [T, Hq, D]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    meta: AttentionMetadata
    keys: list[np.ndarray]  # per request [L, Hkv, D], float64
    values: list[np.ndarray]


def paged_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    window: int | None = None,
) -> PagedBatch:
    """Random batch. With a window, blocks wholly before what any query sees are null, as the scheduler leaves them."""
    rng = np.random.default_rng(seed)
    block_counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(block_counts) + 4
    free = list(rng.permutation(np.arange(1, num_blocks)))
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache = torch.full(shape, float("nan"), dtype=dtype)
    v_cache = torch.full(shape, float("nan"), dtype=dtype)
    tables, keys, values = [], [], []
    for query_len, length, count in zip(query_lens, seq_lens, block_counts, strict=True):
        row = [int(free.pop()) for _ in range(count)]
        key = torch.from_numpy(rng.standard_normal((length, num_kv_heads, head_dim))).to(dtype)
        value = torch.from_numpy(rng.standard_normal((length, num_kv_heads, head_dim))).to(dtype)
        if window is not None:
            first_seen = max(0, length - query_len + 1 - window)
            row = [0 if (i + 1) * block_size <= first_seen else block for i, block in enumerate(row)]
        positions = np.arange(length)
        blocks, offsets = np.array(row)[positions // block_size], positions % block_size
        kept = blocks != 0
        k_cache[blocks[kept], :, offsets[kept]] = key[kept]
        v_cache[blocks[kept], :, offsets[kept]] = value[kept]
        tables.append(row)
        keys.append(key.double().numpy())
        values.append(value.double().numpy())
    query = torch.from_numpy(rng.standard_normal((sum(query_lens), num_heads, head_dim))).to(dtype)
    meta = AttentionMetadata.from_lists(tables, query_lens, seq_lens, block_size)
    return PagedBatch(query, k_cache, v_cache, meta, keys, values)


def attention64(batch: PagedBatch, *, scale: float, window: int | None, soft_cap: float | None) -> np.ndarray:
    """Textbook causal attention in float64, [T, Hq, D]."""
    query = batch.query.double().numpy()
    outputs, token = [], 0
    for request, query_len in enumerate(batch.meta.query_lens_list):
        key, value = batch.keys[request], batch.values[request]
        length, num_kv_heads, _ = key.shape
        group = query.shape[1] // num_kv_heads
        rows = query[token : token + query_len]
        scores = np.einsum("mhd,lhd->hml", rows, np.repeat(key, group, axis=1)) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        own = np.arange(length - query_len, length)[:, None]
        other = np.arange(length)[None, :]
        seen = other <= own
        if window is not None:
            seen &= other > own - window
        scores = np.where(seen[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        outputs.append(np.einsum("hml,lhd->mhd", weights, np.repeat(value, group, axis=1)))
        token += query_len
    return np.concatenate(outputs)
