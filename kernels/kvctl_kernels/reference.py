"""Every operation in plain torch: the reference of the kernel tests, and the backend where no faster one runs.

Works on any device and dtype; reads no tensor back to the host. Knows no model, no scheduler. Correct first, still
decent: attention gathers the pages of a request and hands them to torch's scaled_dot_product_attention, the query
heads that share a KV head packed as rows of one matrix, so K and V are gathered and read once per KV head.

Invariant: memory beyond the results is bounded by MAX_GATHERED_TOKENS and MAX_SCORES, not by batch x context.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvctl_kernels.metadata import AttentionMetadata, KVScales

MAX_GATHERED_TOKENS = 1 << 16  # decode: padded tokens gathered at once
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
MAX_SCORES = 1 << 22  # prefill: query rows x keys attended at once, over all heads


class TorchOps:
    """The operations of `kvctl.engine.ops.Ops` in plain torch."""

    name = "torch"

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def store_kv(
        self,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> None:
        """Write key and value [T, Hkv, D] into the pages [num_blocks, Hkv, block_size, D]; slot -1 is skipped.

        Float8 pages: numbers are divided by their scale and saturate.
        """
        if k_cache.dtype in FLOAT8_DTYPES:
            key, k_cache = _as_float8(key, scales.key if scales else None, k_cache)
            value, v_cache = _as_float8(value, scales.value if scales else None, v_cache)
        block_size = k_cache.shape[2]
        # A skipped token writes into the null block (slot 0), whose content nobody reads: no sync, no dynamic shape.
        slots = slot_mapping.clamp_min(0)
        blocks, offsets = slots // block_size, slots % block_size
        k_cache[blocks, :, offsets] = key
        v_cache[blocks, :, offsets] = value

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query [T, Hq, D] and key [T, Hkv, D] by position, halves paired (the Hugging Face layout).

        positions int64 [T]; cos_sin_cache float32 [max_positions, rot_dim]: cosines, then sines. rot_dim <= D.
        """
        cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

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
        """Rotate query and key, store key and value; return the rotated query [T, Hq, D]."""
        query, key = self.rotary(query, key, positions, cos_sin_cache)
        self.store_kv(key, value, k_cache, v_cache, slot_mapping, scales)
        return query

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
        """Normalise each head of query and key, then `rotary_and_store_kv`."""
        query, key = self.rms_norm(query, q_norm, eps), self.rms_norm(key, k_norm, eps)
        return self.rotary_and_store_kv(
            query, key, value, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, scales
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded once."""
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * inverse * weight.float()).to(x.dtype)

    def rms_norm_residual(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual)."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 * I], gate first: silu(gate) * up, [T, I]."""
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate.float()) * up.float()).to(x.dtype)

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 * I], gate first: gelu(gate, tanh form) * up, [T, I]."""
        gate, up = x.chunk(2, dim=-1)
        return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(x.dtype)

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
        """Causal attention of query [T, Hq, D] over the pages [num_blocks, Hkv, block_size, D]; returns [T, Hq, D].

        `window`: a query sees that many keys at most, itself included. `soft_cap`: scores become
        soft_cap * tanh(score / soft_cap) before the softmax (Gemma 2).
        """
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        num_decode = meta.num_decode_requests
        first = 0
        while first < num_decode:
            last, longest = first, 0
            while last < num_decode:
                visible = min(meta.seq_lens_list[last], window or meta.max_seq_len)
                if last > first and max(longest, visible) * (last - first + 1) > MAX_GATHERED_TOKENS:
                    break
                longest = max(longest, visible)
                last += 1
            output[first:last] = _decode(
                query[first:last],
                k_cache,
                v_cache,
                meta.block_tables[first:last],
                meta.seq_lens[first:last],
                longest,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                scales=scales,
            )
            first = last
        token = num_decode
        for request in range(num_decode, len(meta.query_lens_list)):
            query_len = meta.query_lens_list[request]
            output[token : token + query_len] = _prefill(
                query[token : token + query_len],
                k_cache,
                v_cache,
                meta.block_tables[request],
                meta.seq_lens_list[request],
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                scales=scales,
            )
            token += query_len
        return output


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _as_float8(x: Tensor, scale: Tensor | None, cache: Tensor) -> tuple[Tensor, Tensor]:
    """X [T, Hkv, D] over its scale [Hkv] in the cache's float8, and the cache, both seen as bytes."""
    wide = x.float() if scale is None else x.float() / scale[:, None]
    largest = torch.finfo(cache.dtype).max
    return wide.clamp(-largest, largest).to(cache.dtype).view(torch.uint8), cache.view(torch.uint8)


def _gather(cache: Tensor, slots: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Copy the rows of `slots` int64 [..., L] for every KV head: [..., Hkv, L, D] in `dtype`, times scale [Hkv]."""
    if cache.dtype in FLOAT8_DTYPES:  # torch moves float8 as bytes only
        rows = _gather(cache.view(torch.uint8), slots, torch.uint8, None).view(cache.dtype)
        return rows.to(dtype) if scale is None else (rows.float() * scale[:, None, None]).to(dtype)
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    heads = torch.arange(num_kv_heads, device=slots.device).unsqueeze(-1)
    blocks, offsets = slots // block_size, slots % block_size
    rows = (blocks.unsqueeze(-2) * num_kv_heads + heads) * block_size + offsets.unsqueeze(-2)
    flat = cache.view(num_blocks * num_kv_heads * block_size, head_dim)
    return flat.index_select(0, rows.reshape(-1)).view(*rows.shape, head_dim)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, *, scale: float, soft_cap: float | None
) -> Tensor:
    """query [B, Hkv, M, D], key and value [B, Hkv, L, D], visible bool [B, 1, M or 1, L]: [B, Hkv, M, D]."""
    if soft_cap is None:
        mask = visible.expand(-1, -1, query.shape[2], -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.matmul(weights, value.float()).to(query.dtype)


def _decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    scales: KVScales | None,
) -> Tensor:
    """One query per request, query [R, Hq, D], the last `longest` positions at most: a padded gather for all."""
    num_requests, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    lengths = seq_lens.long().unsqueeze(1)
    starts = lengths - lengths.clamp_max(window) if window is not None else torch.zeros_like(lengths)
    positions = starts + torch.arange(longest, device=query.device)
    visible = positions < lengths
    # Padding reads the request's own last token again: what unused pages hold (it may be NaN) is never touched.
    positions = torch.minimum(positions, lengths - 1)
    slots = block_tables.long().gather(1, positions // block_size) * block_size + positions % block_size
    key = _gather(k_cache, slots, query.dtype, scales.key if scales else None)
    value = _gather(v_cache, slots, query.dtype, scales.value if scales else None)
    packed = query.reshape(num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = _attend(packed, key, value, visible[:, None, None, :], scale=scale, soft_cap=soft_cap)
    return attended.reshape(num_requests, num_heads, head_dim)


def _prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_len: int,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    scales: KVScales | None,
) -> Tensor:
    """The last `query_len` tokens of one request, query [query_len, Hq, D]."""
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    first_position = seq_len - query_len
    start = 0 if window is None else max(0, first_position - window + 1)
    positions = torch.arange(start, seq_len, device=query.device)
    slots = block_table.long()[positions // block_size] * block_size + positions % block_size
    key = _gather(k_cache, slots, query.dtype, scales.key if scales else None).unsqueeze(0)
    value = _gather(v_cache, slots, query.dtype, scales.value if scales else None).unsqueeze(0)
    rows_at_once = max(1, MAX_SCORES // (num_heads * len(positions)))
    parts = []
    for begin in range(0, query_len, rows_at_once):
        end = min(begin + rows_at_once, query_len)
        own = torch.arange(first_position + begin, first_position + end, device=query.device).unsqueeze(1)
        # Keys after the last row of this part are masked for all of it: leave them out.
        low = 0 if window is None else max(0, first_position + begin - window + 1 - start)
        high = first_position + end - start
        seen = positions[low:high] <= own
        if window is not None:
            seen &= positions[low:high] > own - window
        packed = query[begin:end].view(end - begin, num_kv_heads, group, head_dim)
        packed = packed.permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * (end - begin), head_dim)
        attended = _attend(
            packed,
            key[:, :, low:high],
            value[:, :, low:high],
            seen.repeat(group, 1)[None, None],
            scale=scale,
            soft_cap=soft_cap,
        )
        attended = attended.view(num_kv_heads, group, end - begin, head_dim).permute(2, 0, 1, 3)
        parts.append(attended.reshape(end - begin, num_heads, head_dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
