"""How the attention kernels are launched: which kernel, which grid, which configuration, how many splits.

No launch reads a tensor back to the host: grids come from batch sizes and the list twins of the metadata. Knows no
model and no scheduler.
"""

import math

import torch
from torch import Tensor

from kvctl_kernels import triton_attention as attention
from kvctl_kernels.configs import (
    Arch,
    AttentionConfig,
    arch_of,
    block_dim,
    decode_config,
    dot_precision,
    next_power_of_2,
    num_splits,
    prefill_config,
    prefix_splits,
)
from kvctl_kernels.metadata import AttentionMetadata, KVScales

LOG2_E = math.log2(math.e)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)


class TritonAttention:
    """Paged attention for one device.

    Args:
        arch: row of the configuration table; found from the device if None.
        num_multiprocessors: for the number of splits; found from the device if None.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        reason: str = "",
        arch: Arch | None = None,
        num_multiprocessors: int | None = None,
    ) -> None:
        self.reason = reason
        if arch is None or num_multiprocessors is None:
            properties = torch.cuda.get_device_properties(device)
            arch = arch or arch_of((properties.major, properties.minor), torch.version.hip is not None)
            num_multiprocessors = num_multiprocessors or properties.multi_processor_count
        self.arch: Arch = arch
        self._num_multiprocessors = num_multiprocessors

    def pages(self, cache: Tensor) -> tuple[Tensor, int]:
        """The cache as the kernels take it, and how its numbers are held."""
        if cache.dtype not in _FLOAT8:
            return cache, int(attention.KV_SAME.value)
        if cache.dtype == torch.float8_e4m3fn and self.arch == "sm_80":
            return cache.view(torch.uint8), int(attention.KV_E4M3_BITS.value)
        return cache, int(attention.KV_FLOAT8.value)

    def paged_attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Causal attention of query [T, Hq, D] over the pages: decode rows by split KV, the others by prefill."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        num_decode, num_requests = meta.num_decode_requests, len(meta.query_lens_list)
        if num_decode and window is None and meta.shared_prefix is not None:
            self.cascade_decode(
                query[:num_decode], k_cache, v_cache, meta.block_tables[:num_decode], meta.seq_lens[:num_decode],
                meta.shared_prefix, scale=scale, soft_cap=soft_cap, scales=scales, out=out[:num_decode],
            )  # fmt: skip
        elif num_decode:
            self.paged_decode(
                query[:num_decode], k_cache, v_cache, meta.block_tables[:num_decode], meta.seq_lens[:num_decode],
                scale=scale, window=window, soft_cap=soft_cap, scales=scales, out=out[:num_decode],
            )  # fmt: skip
        if num_decode < num_requests:
            self.paged_prefill(
                query, k_cache, v_cache, meta.block_tables[num_decode:], meta.seq_lens[num_decode:],
                meta.query_start_loc[num_decode:], num_query_tokens=query.shape[0] - num_decode,
                scale=scale, window=window, soft_cap=soft_cap, scales=scales, out=out,
            )  # fmt: skip
        return out

    def paged_decode(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        scales: KVScales | None = None,
        splits: int | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """One query per request, [R, Hq, D]; its context is cut into `splits`, by the batch size if None.

        `lse`: float32 [R, Hq], filled with the base-2 log-sum-exp if given. Returns `out`, like query.
        """
        num_requests, num_heads, _ = query.shape
        num_kv_heads = k_cache.shape[1]
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if splits is None:
            splits = num_splits(num_requests, num_kv_heads, self._num_multiprocessors)
        parts, parts_lse = (out, lse) if splits == 1 else _parts(num_requests, num_heads, splits, query)
        self._decode_parts(
            query, k_cache, v_cache, block_tables, seq_lens, parts, parts_lse, splits, splits,
            scale=scale, window=window, soft_cap=soft_cap, scales=scales, kv_start=None,
        )  # fmt: skip
        if splits > 1:
            assert parts_lse is not None
            self.merge_attention_states(parts, parts_lse, out=out, lse=lse)
        return out

    def _decode_parts(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor | None,
        splits: int,
        num_parts: int,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        scales: KVScales | None,
        kv_start: Tensor | None,
    ) -> None:
        """Fill `splits` of the `num_parts` parts of each row of `out`, from where `out` and `lse` begin.

        `kv_start` int32 [1]: leave out the tokens before it (a shared prefix).
        """
        num_requests, num_heads, head_dim = query.shape
        num_kv_heads, page = k_cache.shape[1], k_cache.shape[2]
        group = num_heads // num_kv_heads
        config = decode_config(self.arch, head_dim, k_cache.element_size(), group)
        k_pages, kind = self.pages(k_cache)
        v_pages, _ = self.pages(v_cache)
        attention.paged_decode_kernel[(num_requests, num_kv_heads, splits)](
            out, lse, query, k_pages, v_pages, block_tables, seq_lens, *scale_tensors(scales),
            *_scaling(scale, soft_cap), window or 0, kv_start, query.stride(0), block_tables.stride(0), num_parts,
            GROUP=group, BLOCK_M=config.block_m, HEAD_DIM=head_dim, BLOCK_D=block_dim(head_dim), PAGE=page,
            BLOCK_N=config.block_n, HAS_START=kv_start is not None, HAS_WINDOW=window is not None,
            HAS_CAP=soft_cap is not None, HAS_SCALES=scales is not None, KV_KIND=kind, WRITE_LSE=lse is not None,
            PRECISION=self._precision(query), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    def _precision(self, query: Tensor) -> str:
        return dot_precision(self.arch, query.dtype is torch.float32)

    def paged_prefill(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        *,
        num_query_tokens: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        scales: KVScales | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal: query tokens of R requests, rows query_start_loc[r] .. [r + 1] of `query` and `out` [T, Hq, D]."""
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        num_requests, group = seq_lens.shape[0], query.shape[1] // k_cache.shape[1]
        config = prefill_config(
            self.arch, query.shape[2], k_cache.element_size(), group,
            is_special=window is not None or soft_cap is not None,
        )  # fmt: skip
        blocks = num_query_tokens // (config.block_m // group) + num_requests  # a bound: lengths are on the device
        self._prefill(
            (blocks, k_cache.shape[1], 1), config, out, None, query, k_cache, v_cache, block_tables, seq_lens,
            query_start_loc, num_requests, 1, scale=scale, window=window, soft_cap=soft_cap, scales=scales,
        )  # fmt: skip
        return out

    def _prefill(
        self,
        grid: tuple[int, int, int],
        config: AttentionConfig,
        out: Tensor,
        lse: Tensor | None,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        num_requests: int,
        num_parts: int,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        scales: KVScales | None,
    ) -> None:
        """With `lse`: the parts of a shared prefix (see the kernel), the first ones of `num_parts` of each row."""
        _, num_heads, head_dim = query.shape
        num_kv_heads, page = k_cache.shape[1], k_cache.shape[2]
        k_pages, kind = self.pages(k_cache)
        v_pages, _ = self.pages(v_cache)
        attention.paged_prefill_kernel[grid](
            out, lse, query, k_pages, v_pages, block_tables, seq_lens, query_start_loc, *scale_tensors(scales),
            *_scaling(scale, soft_cap), window or 0, num_requests, query.stride(0), block_tables.stride(0), num_parts,
            GROUP=num_heads // num_kv_heads, BLOCK_M=config.block_m, HEAD_DIM=head_dim, BLOCK_D=block_dim(head_dim),
            PAGE=page, BLOCK_N=config.block_n, IS_PART=lse is not None, HAS_WINDOW=window is not None,
            HAS_CAP=soft_cap is not None, HAS_SCALES=scales is not None, KV_KIND=kind,
            PRECISION=self._precision(query), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    def cascade_decode(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        shared_prefix: Tensor,
        *,
        scale: float,
        soft_cap: float | None = None,
        scales: KVScales | None = None,
        out: Tensor,
    ) -> Tensor:
        """Decode R requests whose first tokens stand in the same blocks; shared_prefix as in AttentionMetadata.

        The shared part is read once per block of query rows (128 rows at most, so once for 16 to 64 requests), as a
        prefill of R queries that see all of it; each one's own part by the decode kernel; one merge joins all parts.
        """
        num_requests, num_heads, head_dim = query.shape
        num_kv_heads = k_cache.shape[1]
        group = num_heads // num_kv_heads
        config = prefill_config(self.arch, head_dim, k_cache.element_size(), group, is_special=True)
        shared = prefix_splits(num_requests, group, config.block_m, num_kv_heads, self._num_multiprocessors)
        own = num_splits(num_requests, num_kv_heads, self._num_multiprocessors)
        parts, lse = _parts(num_requests, num_heads, shared + own, query)
        query_blocks = -(-num_requests // (config.block_m // group))
        self._prefill(
            (query_blocks, num_kv_heads, shared), config, parts, lse, query, k_cache, v_cache, block_tables[:1],
            shared_prefix[2:], shared_prefix[:2], 1, shared + own,
            scale=scale, window=None, soft_cap=soft_cap, scales=scales,
        )  # fmt: skip
        self._decode_parts(
            query, k_cache, v_cache, block_tables, seq_lens, parts[:, :, shared:], lse[:, :, shared:], own,
            shared + own, scale=scale, window=None, soft_cap=soft_cap, scales=scales, kv_start=shared_prefix[2:],
        )  # fmt: skip
        return self.merge_attention_states(parts, lse, out=out)

    def merge_attention_states(
        self, parts: Tensor, parts_lse: Tensor, *, out: Tensor, lse: Tensor | None = None
    ) -> Tensor:
        """Combine partial results parts [R, Hq, P, D] by their base-2 lse [R, Hq, P] into out [R, Hq, D].

        All contiguous; `lse` float32 [R, Hq] is filled if given.
        """
        num_requests, num_heads, num_parts, head_dim = parts.shape
        rows = num_requests * num_heads
        if rows:
            attention.merge_attention_states_kernel[(rows,)](
                out, lse, parts, parts_lse, num_parts,
                BLOCK_P=next_power_of_2(num_parts), HEAD_DIM=head_dim, BLOCK_D=next_power_of_2(head_dim),
                WRITE_LSE=lse is not None, num_warps=4,
            )  # fmt: skip
        return out


def _parts(num_requests: int, num_heads: int, num_parts: int, query: Tensor) -> tuple[Tensor, Tensor]:
    """Room for partial results float32 [R, Hq, P, D] and their lse [R, Hq, P]."""
    shape = (num_requests, num_heads, num_parts)
    parts = torch.empty((*shape, query.shape[2]), dtype=torch.float32, device=query.device)
    return parts, torch.empty(shape, dtype=torch.float32, device=query.device)


def scale_tensors(scales: KVScales | None) -> tuple[Tensor | None, Tensor | None]:
    """As the kernels take them: a pointer each, or none."""
    return (None, None) if scales is None else (scales.key, scales.value)


def _scaling(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(scale, cap) as the kernels take them: base 2, and with a soft cap the inner scale over the cap."""
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return scale / soft_cap, soft_cap * LOG2_E
