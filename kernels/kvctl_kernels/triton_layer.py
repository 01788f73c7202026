"""The small operations of a decoder layer on GPUs, fused so that each is one launch: KV store, rotary, norms, gates.

Plain pointer Triton, arithmetic in float32, rounded once at the store. Knows no model. Tokens are rows; a row may be
part of a wider one (a view of the fused QKV product), so each tensor comes with its row stride. Launchers are in
`triton_ops`.
"""

import triton
import triton.language as tl

# How a page stores a number, as in triton_attention: unchanged, as a float8 the hardware converts to, or as e4m3
# bits in a uint8 made with integers (sm_80).
from kvctl_kernels.triton_attention import KV_E4M3_BITS, KV_FLOAT8

E4M3_MAX = tl.constexpr(448.0)
E4M3FNUZ_MAX = tl.constexpr(240.0)  # AMD gfx942: other codes than e4m3
E5M2_MAX = tl.constexpr(57344.0)


@triton.jit
def f32_to_e4m3_bits(x):
    """Round float32 to e4m3 bits (uint8): to nearest even, saturating at +-448, NaN stays NaN (0x7f)."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal results (>= 2**-6): drop 20 mantissa bits, rounding half to even by adding 0x7ffff plus the lowest kept
    # bit, and move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal results are multiples of 2**-9: adding 2**14 lets the float adder round to them.
    shifted = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True)
    subnormal = shifted - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)  # 2**-6
    code = tl.where(magnitude >= 0x43E00000, 0x7E, code)  # 448 and above
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)  # NaN
    return (code | sign).to(tl.uint8)


@triton.jit
def _as_stored(x, dtype: tl.constexpr, KV_KIND: tl.constexpr):
    """float32 values (already divided by their scale) as the pages hold them; float8 saturates, NaN stays NaN."""
    if KV_KIND == KV_E4M3_BITS:
        return f32_to_e4m3_bits(x)
    if KV_KIND == KV_FLOAT8:
        other: tl.constexpr = E4M3FNUZ_MAX if dtype == tl.float8e4b8 else E4M3_MAX
        limit: tl.constexpr = E5M2_MAX if dtype == tl.float8e5 else other
        return tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    return x.to(dtype)


@triton.jit
def store_kv_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,  # int64 [T], -1: skip
    k_scale_ptr,  # float32 [Hkv]
    v_scale_ptr,
    key_stride,
    value_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    KV_KIND: tl.constexpr,
):
    """Write one token's K and V of all heads into its slot. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    key = tl.load(key_ptr + token * key_stride + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + token * value_stride + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        key /= tl.load(k_scale_ptr + heads, mask=heads < NUM_HEADS, other=1.0)[:, None]
        value /= tl.load(v_scale_ptr + heads, mask=heads < NUM_HEADS, other=1.0)[:, None]
    page = slot // PAGE
    to = ((page * NUM_HEADS + heads) * PAGE + slot % PAGE)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(k_cache_ptr + to, _as_stored(key, k_cache_ptr.dtype.element_ty, KV_KIND), mask=mask)
    tl.store(v_cache_ptr + to, _as_stored(value, v_cache_ptr.dtype.element_ty, KV_KIND), mask=mask)


@triton.jit
def _normed_halves(first, second, weight_ptr, halves, HALF: tl.constexpr, in_half, eps):
    """RMS norm over one head given as two halves [BLOCK_H, BLOCK_HALF] (QK norm)."""
    mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
    inverse = tl.rsqrt(mean_square + eps)[:, None]
    low = tl.load(weight_ptr + halves, mask=in_half, other=0.0).to(tl.float32)
    high = tl.load(weight_ptr + HALF + halves, mask=in_half, other=0.0).to(tl.float32)
    return first * inverse * low[None, :], second * inverse * high[None, :]


@triton.jit
def rotary_kernel(
    x_ptr,  # [T, NUM_HEADS, HEAD_DIM], rows x_stride apart
    out_ptr,  # [T, NUM_HEADS, HEAD_DIM], rows out_stride apart; may be x
    positions_ptr,  # int64 [T]
    cos_sin_ptr,  # float32 [P, 2 * HALF]: cosines, then sines
    x_stride,
    out_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,  # of the rotated dimensions
    BLOCK_HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Rotate each head by its token's position. Grid (T,).

    Dimensions beyond 2 * HALF pass unrotated and are not touched (the launcher copies them if out is not x).
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    halves = tl.arange(0, BLOCK_HALF)
    in_half = halves < HALF
    mask = (heads < NUM_HEADS)[:, None] & in_half[None, :]
    at = heads[:, None] * HEAD_DIM + halves[None, :]
    first = tl.load(x_ptr + token * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + token * x_stride + at + HALF, mask=mask, other=0.0).to(tl.float32)
    row = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    cos = tl.load(row + halves, mask=in_half, other=0.0)[None, :]
    sin = tl.load(row + HALF + halves, mask=in_half, other=0.0)[None, :]
    to = out_ptr + token * out_stride + at
    tl.store(to, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_rotary_store_kv_kernel(
    q_out_ptr,  # [T, Hq, HEAD_DIM], contiguous
    q_ptr,
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,  # int64 [T], -1: K and V are not stored
    positions_ptr,  # int64 [T]
    cos_sin_ptr,  # float32 [P, HEAD_DIM]: cosines, then sines
    q_weight_ptr,  # [HEAD_DIM], with HAS_NORM
    k_weight_ptr,
    k_scale_ptr,  # float32 [Hkv]
    v_scale_ptr,
    eps,
    q_stride,
    key_stride,
    value_stride,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HALF: tl.constexpr,  # HEAD_DIM // 2
    BLOCK_HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    KV_KIND: tl.constexpr,
):
    """All that happens to a KV head and its GROUP query heads between projection and attention. Grid (T, Hkv).

    Norm if asked, rotary, store; rounds where the operations one by one would, so that it gives their bits.
    """
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    HEAD_DIM: tl.constexpr = 2 * HALF
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_G)
    halves = tl.arange(0, BLOCK_HALF)
    in_half = halves < HALF
    table = cos_sin_ptr + tl.load(positions_ptr + token) * HEAD_DIM
    cos = tl.load(table + halves, mask=in_half, other=0.0)[None, :]
    sin = tl.load(table + HALF + halves, mask=in_half, other=0.0)[None, :]

    mask = (rows < GROUP)[:, None] & in_half[None, :]
    at = (kv_head * GROUP + rows)[:, None] * HEAD_DIM + halves[None, :]
    first = tl.load(q_ptr + token * q_stride + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(q_ptr + token * q_stride + at + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        first, second = _normed_halves(first, second, q_weight_ptr, halves, HALF, in_half, eps)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    to = q_out_ptr + token * num_kv_heads * GROUP * HEAD_DIM + at
    tl.store(to, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(to + HALF, (second * cos + first * sin).to(dtype), mask=mask)

    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    here = kv_head * HEAD_DIM + halves[None, :]
    mask = in_half[None, :]
    first = tl.load(key_ptr + token * key_stride + here, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(key_ptr + token * key_stride + here + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        first, second = _normed_halves(first, second, k_weight_ptr, halves, HALF, in_half, eps)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    key_low = (first * cos - second * sin).to(dtype).to(tl.float32)
    key_high = (second * cos + first * sin).to(dtype).to(tl.float32)
    value_low = tl.load(value_ptr + token * value_stride + here, mask=mask, other=0.0).to(tl.float32)
    value_high = tl.load(value_ptr + token * value_stride + here + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        k_scale = tl.load(k_scale_ptr + kv_head)
        v_scale = tl.load(v_scale_ptr + kv_head)
        key_low, key_high = key_low / k_scale, key_high / k_scale
        value_low, value_high = value_low / v_scale, value_high / v_scale
    stored: tl.constexpr = k_cache_ptr.dtype.element_ty
    page_at = (((slot // PAGE) * num_kv_heads + kv_head) * PAGE + slot % PAGE) * HEAD_DIM + halves[None, :]
    tl.store(k_cache_ptr + page_at, _as_stored(key_low, stored, KV_KIND), mask=mask)
    tl.store(k_cache_ptr + page_at + HALF, _as_stored(key_high, stored, KV_KIND), mask=mask)
    tl.store(v_cache_ptr + page_at, _as_stored(value_low, stored, KV_KIND), mask=mask)
    tl.store(v_cache_ptr + page_at + HALF, _as_stored(value_high, stored, KV_KIND), mask=mask)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,  # with HAS_RESIDUAL: read, x added, written back
    weight_ptr,  # [N]
    out_ptr,
    eps,
    inner,  # rows per outer row: 1, or the heads of a token
    x_stride,  # between outer rows
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """out = x / sqrt(mean(x^2) + eps) * weight for one row of N, x + residual in place of x. Grid (rows,).

    Row r of x stands at (r // inner) * x_stride + (r % inner) * N; residual and out are contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    x = tl.load(x_ptr + (row // inner) * x_stride + (row % inner) * N + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * N + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * N + columns, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_and_mul_kernel(
    x_ptr,  # [T, 2 * N], gate first
    out_ptr,  # [T, N]
    x_stride,
    N,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    """out = act(gate) * up; act is silu, or gelu in its tanh form. Grid (T, N / BLOCK rounded up)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    gate = tl.load(x_ptr + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + N + columns, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
        gate = gate / (1.0 + tl.exp2(-2.885390081777927 * inner))  # 0.5 * (1 + tanh(y)) = sigmoid(2 y)
    else:
        gate = gate / (1.0 + tl.exp2(-1.4426950408889634 * gate))
    tl.store(out_ptr + token * N + columns, (gate * up).to(out_ptr.dtype.element_ty), mask=mask)
