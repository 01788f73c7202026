"""The tensors that hold keys and values: allocated once, addressed by block id.

Knows no request and no scheduler. Position i of a block (`0 <= i < layers_per_block`) has one pair of tensors
[num_blocks, num_kv_heads, block_size, head_dim]; layer l is the i-th layer of its group and uses pair i with that
group's block table. Invariants: block 0 is the null block and reads as zeros until something is stored; memory is
touched only when a block is first written, so that a large cache costs nothing at start. Floor 2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.engine.ops import KVScales
from kvctl_kernels.cpu_memory import zero_pages


class LayerKV(NamedTuple):
    """What one layer reads and writes; `group` is the index of its block table."""

    k_cache: Tensor
    v_cache: Tensor
    group: int
    scales: KVScales | None = None  # of float8 pages, where the checkpoint has some


@dataclass(frozen=True, slots=True)
class KVCache:
    """All layers' caches, by layer number, and the memory they take together."""

    layers: tuple[LayerKV, ...]
    num_blocks: int
    block_size: int
    total_bytes: int


def _zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    count = math.prod(shape) * dtype.itemsize
    if device.type != "cpu":
        return torch.zeros(count, dtype=torch.uint8, device=device).view(dtype).view(shape)
    return zero_pages(count).view(dtype).view(shape)


def allocate_kv_cache(
    groups: Sequence[KVCacheGroup],
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: Mapping[int, KVScales] | None = None,
) -> KVCache:
    """Allocate for every layer of `groups`. `scales`: layer number -> what its float8 pages are scaled by.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is less memory than the plan said.
    """
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    pairs = [
        (_zero_pages(shape, dtype, device), _zero_pages(shape, dtype, device))
        for _ in range(max(len(group.layer_indices) for group in groups))
    ]
    layers: dict[int, LayerKV] = {}
    for group_index, group in enumerate(groups):
        for (k_cache, v_cache), layer in zip(pairs, group.layer_indices, strict=False):
            layers[layer] = LayerKV(k_cache, v_cache, group_index, (scales or {}).get(layer))
    return KVCache(
        layers=tuple(layers[layer] for layer in range(len(layers))),
        num_blocks=num_blocks,
        block_size=block_size,
        total_bytes=sum(k.nbytes + v.nbytes for k, v in pairs),
    )
