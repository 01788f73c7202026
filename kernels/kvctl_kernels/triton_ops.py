"""The Triton kernels behind the signatures of `reference.TorchOps`: which kernel, which grid, which configuration.

Imports triton, so it is imported only where there is a GPU (or the interpreter). No launch reads a tensor back to
the host: grids come from the list twins of the metadata. Knows no model and no scheduler.
"""

import math

import torch
import triton
from torch import Tensor

from kvctl_kernels import triton_attention as attention
from kvctl_kernels import triton_layer as layer
from kvctl_kernels.configs import Arch, arch_of, decode_config, next_power_of_2, num_splits, prefill_config
from kvctl_kernels.metadata import AttentionMetadata, KVScales

LOG2_E = math.log2(math.e)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)


class TritonOps:
    """The operations of `kvctl.engine.ops.Ops` as Triton kernels for one device.

    Args:
        arch: row of the configuration table; found from the device if None.
        num_multiprocessors: for the number of splits; found from the device if None.
    """

    name = "triton"

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

    # ---- KV cache ----

    def _pages(self, cache: Tensor) -> tuple[Tensor, int]:
        """The cache as the kernels take it, and how its numbers are held."""
        if cache.dtype not in _FLOAT8:
            return cache, int(attention.KV_SAME.value)
        if cache.dtype == torch.float8_e4m3fn and self.arch == "sm_80":
            return cache.view(torch.uint8), int(attention.KV_E4M3_BITS.value)
        return cache, int(attention.KV_FLOAT8.value)

    def store_kv(
        self,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> None:
        """Write key and value [T, Hkv, D] into the pages; slot -1 is skipped. Scales are divided by."""
        num_tokens, num_heads, head_dim = key.shape
        if not num_tokens:
            return
        k_pages, kind = self._pages(k_cache)
        v_pages, _ = self._pages(v_cache)
        layer.store_kv_kernel[(num_tokens,)](
            key, value, k_pages, v_pages, slot_mapping, *_scale_tensors(scales), key.stride(0), value.stride(0),
            NUM_HEADS=num_heads, BLOCK_H=next_power_of_2(num_heads), HEAD_DIM=head_dim,
            BLOCK_D=next_power_of_2(head_dim), PAGE=k_cache.shape[2], HAS_SCALES=scales is not None, KV_KIND=kind,
            num_warps=4,
        )  # fmt: skip

    # ---- layers ----

    def _rotate(self, x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
        num_tokens, num_heads, head_dim = x.shape
        half = cos_sin_cache.shape[1] // 2
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if 2 * half == head_dim else x.contiguous()
        if num_tokens:
            layer.rotary_kernel[(num_tokens,)](
                x, out, positions, cos_sin_cache, x.stride(0), out.stride(0),
                NUM_HEADS=num_heads, BLOCK_H=next_power_of_2(num_heads), HALF=half, BLOCK_HALF=next_power_of_2(half),
                HEAD_DIM=head_dim, num_warps=4,
            )  # fmt: skip
        return out

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query [T, Hq, D] and key [T, Hkv, D]."""
        return self._rotate(query, positions, cos_sin_cache), self._rotate(key, positions, cos_sin_cache)

    def rotary_and_store_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Rotate query and key, store key and value; return the rotated query."""
        return self._place(
            None, None, 0.0, query, key, value, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, scales
        )

    def norm_rotary_and_store_kv(
        self,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> Tensor:
        """`rotary_and_store_kv` of query and key with each head normalised first, in the same launch."""
        return self._place(
            q_norm, k_norm, eps, query, key, value, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, scales
        )

    def _place(
        self,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None,
    ) -> Tensor:
        num_tokens, num_kv_heads, head_dim = key.shape
        if cos_sin_cache.shape[1] != head_dim:  # a part of each head passes unrotated: rare, in more launches
            if q_norm is not None and k_norm is not None:
                query, key = self.rms_norm(query, q_norm, eps), self.rms_norm(key, k_norm, eps)
            query, key = self.rotary(query, key, positions, cos_sin_cache)
            self.store_kv(key, value, k_cache, v_cache, slot_mapping, scales)
            return query
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if num_tokens:
            group = query.shape[1] // num_kv_heads
            k_pages, kind = self._pages(k_cache)
            v_pages, _ = self._pages(v_cache)
            layer.norm_rotary_store_kv_kernel[(num_tokens, num_kv_heads)](
                out, query, key, value, k_pages, v_pages, slot_mapping, positions, cos_sin_cache, q_norm, k_norm,
                *_scale_tensors(scales), eps, query.stride(0), key.stride(0), value.stride(0),
                GROUP=group, BLOCK_G=next_power_of_2(group), HALF=head_dim // 2,
                BLOCK_HALF=next_power_of_2(head_dim // 2), PAGE=k_cache.shape[2], HAS_NORM=q_norm is not None,
                HAS_SCALES=scales is not None, KV_KIND=kind, num_warps=1,
            )  # fmt: skip
        return out

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        size = x.shape[-1]
        rows = x.numel() // size
        inner = x.shape[-2] if x.dim() == 3 else 1
        if rows:
            layer.rms_norm_kernel[(rows,)](
                x, residual, weight, out, eps, inner, x.stride(0) if x.dim() > 1 else size,
                N=size, BLOCK=next_power_of_2(size), HAS_RESIDUAL=residual is not None,
                num_warps=8 if size > 2048 else 4,
            )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension of x [T, N] or [T, heads, N]."""
        return self._norm(x, None, weight, eps)

    def rms_norm_residual(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual); `residual` [T, N], contiguous, is overwritten."""
        return self._norm(x, residual, weight, eps), residual

    def _gate(self, x: Tensor, gelu: bool) -> Tensor:
        num_tokens, width = x.shape[0], x.shape[1] // 2
        out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
        block = min(1024, next_power_of_2(width))
        if num_tokens:
            layer.gate_and_mul_kernel[(num_tokens, triton.cdiv(width, block))](
                x, out, x.stride(0), width, BLOCK=block, GELU=gelu, num_warps=4
            )
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 * I], gate first: silu(gate) * up."""
        return self._gate(x, gelu=False)

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 * I], gate first: gelu_tanh(gate) * up."""
        return self._gate(x, gelu=True)

    # ---- attention ----

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
        kv_start: Tensor | None = None,
        splits: int | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """One query per request, [R, Hq, D]. `kv_start` int32 [1]: leave out the tokens before it (a shared prefix).

        `lse`: float32 [R, Hq], filled with the base-2 log-sum-exp if given. Returns `out`, like query.
        """
        num_requests, num_heads, head_dim = query.shape
        num_kv_heads, page = k_cache.shape[1], k_cache.shape[2]
        group = num_heads // num_kv_heads
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        config = decode_config(self.arch, head_dim, k_cache.element_size(), group)
        if splits is None:
            splits = num_splits(num_requests, num_kv_heads, self._num_multiprocessors)
        if splits == 1:
            parts, parts_lse = out, lse
        else:
            parts = torch.empty((num_requests, num_heads, splits, head_dim), dtype=torch.float32, device=query.device)
            parts_lse = torch.empty((num_requests, num_heads, splits), dtype=torch.float32, device=query.device)
        k_pages, kind = self._pages(k_cache)
        v_pages, _ = self._pages(v_cache)
        attention.paged_decode_kernel[(num_requests, num_kv_heads, splits)](
            parts, parts_lse, query, k_pages, v_pages, block_tables, seq_lens, *_scale_tensors(scales),
            *_scaling(scale, soft_cap), window or 0, kv_start, query.stride(0), block_tables.stride(0),
            GROUP=group, BLOCK_M=config.block_m, HEAD_DIM=head_dim, BLOCK_D=next_power_of_2(head_dim), PAGE=page,
            BLOCK_N=config.block_n, NUM_SPLITS=splits, HAS_START=kv_start is not None, HAS_WINDOW=window is not None,
            HAS_CAP=soft_cap is not None, HAS_SCALES=scales is not None, KV_KIND=kind, WRITE_LSE=parts_lse is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        if splits > 1:
            assert parts_lse is not None
            self.merge_attention_states(parts, parts_lse, out=out, lse=lse)
        return out

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
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        scales: KVScales | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Query tokens of R requests, rows query_start_loc[r] .. [r + 1] of `query` and `out` [T, Hq, D].

        `causal=False` lets every query see all `seq_lens[r]` tokens: the shared prefix of many requests.
        """
        _, num_heads, head_dim = query.shape
        num_kv_heads, page = k_cache.shape[1], k_cache.shape[2]
        group = num_heads // num_kv_heads
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        is_special = window is not None or soft_cap is not None or not causal
        config = prefill_config(self.arch, head_dim, k_cache.element_size(), group, is_special=is_special)
        num_requests = seq_lens.shape[0]
        blocks = num_query_tokens // (config.block_m // group) + num_requests
        k_pages, kind = self._pages(k_cache)
        v_pages, _ = self._pages(v_cache)
        attention.paged_prefill_kernel[(blocks, num_kv_heads)](
            out, lse, query, k_pages, v_pages, block_tables, seq_lens, query_start_loc, *_scale_tensors(scales),
            *_scaling(scale, soft_cap), window or 0, num_requests, query.stride(0), block_tables.stride(0),
            GROUP=group, BLOCK_M=config.block_m, HEAD_DIM=head_dim, BLOCK_D=next_power_of_2(head_dim), PAGE=page,
            BLOCK_N=config.block_n, CAUSAL=causal, HAS_WINDOW=window is not None, HAS_CAP=soft_cap is not None,
            HAS_SCALES=scales is not None, KV_KIND=kind, WRITE_LSE=lse is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return out

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

        The shared part is read once for all of them, as a prefill without causality of R queries over one context;
        each one's own part by `paged_decode`; the two are merged.
        """
        num_requests, num_heads, head_dim = query.shape
        parts = torch.empty((2, num_requests, num_heads, head_dim), dtype=query.dtype, device=query.device)
        lse = torch.empty((2, num_requests, num_heads), dtype=torch.float32, device=query.device)
        self.paged_prefill(
            query, k_cache, v_cache, block_tables[:1], shared_prefix[2:], shared_prefix[:2],
            num_query_tokens=num_requests, scale=scale, causal=False, soft_cap=soft_cap, scales=scales,
            out=parts[0], lse=lse[0],
        )  # fmt: skip
        self.paged_decode(
            query, k_cache, v_cache, block_tables, seq_lens, scale=scale, soft_cap=soft_cap, scales=scales,
            kv_start=shared_prefix[2:], out=parts[1], lse=lse[1],
        )  # fmt: skip
        return self.merge_attention_states(parts.permute(1, 2, 0, 3), lse.permute(1, 2, 0), out=out)

    def merge_attention_states(
        self, parts: Tensor, parts_lse: Tensor, *, out: Tensor, lse: Tensor | None = None
    ) -> Tensor:
        """Combine partial results parts [R, Hq, P, D] by their base-2 lse [R, Hq, P] into out [R, Hq, D].

        `parts` and `parts_lse` may be any view whose rows (r, h) are evenly spaced and whose last axis is contiguous.
        """
        num_requests, num_heads, num_parts, head_dim = parts.shape
        rows = num_requests * num_heads
        if rows:
            attention.merge_attention_states_kernel[(rows,)](
                out, lse, parts, parts_lse, parts.stride(1), parts.stride(2), parts_lse.stride(1), parts_lse.stride(2),
                NUM_PARTS=num_parts, BLOCK_P=next_power_of_2(num_parts), HEAD_DIM=head_dim,
                BLOCK_D=next_power_of_2(head_dim), WRITE_LSE=lse is not None, num_warps=4,
            )  # fmt: skip
        return out


def _scale_tensors(scales: KVScales | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scales is None else (scales.key, scales.value)


def _scaling(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(scale, cap) as the kernels take them: base 2, and with a soft cap the inner scale over the cap."""
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return scale / soft_cap, soft_cap * LOG2_E
