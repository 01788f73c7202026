"""The Triton kernels behind the signatures of `reference.TorchOps`: which kernel, which grid, which configuration.

Imports triton, so it is imported only where there is a GPU (or the interpreter). No launch reads a tensor back to
the host. Knows no model and no scheduler.
"""

import torch
import triton
from torch import Tensor

from kvctl_kernels import triton_layer as layer
from kvctl_kernels.configs import next_power_of_2
from kvctl_kernels.metadata import KVScales
from kvctl_kernels.triton_paged import TritonAttention, scale_tensors


class TritonOps(TritonAttention):
    """The operations of `kvctl.engine.ops.Ops` as Triton kernels for one device; attention is in `triton_paged`."""

    name = "triton"

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
        k_pages, kind = self.pages(k_cache)
        v_pages, _ = self.pages(v_cache)
        layer.store_kv_kernel[(num_tokens,)](
            key, value, k_pages, v_pages, slot_mapping, *scale_tensors(scales), key.stride(0), value.stride(0),
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
            k_pages, kind = self.pages(k_cache)
            v_pages, _ = self.pages(v_cache)
            layer.norm_rotary_store_kv_kernel[(num_tokens, num_kv_heads)](
                out, query, key, value, k_pages, v_pages, slot_mapping, positions, cos_sin_cache, q_norm, k_norm,
                *scale_tensors(scales), eps, query.stride(0), key.stride(0), value.stride(0),
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
