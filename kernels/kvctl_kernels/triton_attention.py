"""Paged attention on GPUs: decode over split KV, chunked prefill, and the merge of partial results.

Plain pointer Triton: no block pointers, inline assembly, libdevice or autotune, so that the same source runs under
Triton 3.6 to 3.9, compiles for NVIDIA sm_80 to sm_120 and AMD gfx942, and can be checked in the interpreter. Knows
no model and no scheduler. Launchers and the table of configurations are in `triton_ops` and `configs`.

Shapes: query [T, Hq, D]; pages [num_blocks, Hkv, block_size, D], contiguous; block tables int32 [R, max_blocks].
GROUP = Hq / Hkv query heads share a KV head and are packed as rows of one matrix, so that K and V are read once.

Rules kept here, each learnt from a fault:
    arithmetic in float32, bfloat16 only as operand of a dot; page offsets in int64 (a cache passes 2**31 elements);
    float32 operands are multiplied as float32 (PRECISION): NVIDIA's default for them is TF32, three digits;
    scores are scaled by log2(e), the softmax uses exp2, lse is base 2;
    what lies beyond a sequence (it may be NaN) is never loaded; an empty part has o = 0 and lse = -inf.
"""

import triton
import triton.language as tl

# How a page holds a number: as the query's dtype, as a float8 the hardware converts, or as e4m3 bits in a uint8
# (sm_80 has no e4m3: decoded with integer shifts).
KV_SAME = tl.constexpr(0)
KV_FLOAT8 = tl.constexpr(1)
KV_E4M3_BITS = tl.constexpr(2)


@triton.jit
def e4m3_bits_to_f16(bits):
    """Decode e4m3 bits (uint8) exactly: move sign, exponent and mantissa into a float16, correct the bias by 2**8."""
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _operand(tile, dtype: tl.constexpr, KV_KIND: tl.constexpr):
    """A tile of K or V as operand of a dot with the query's dtype; scales are applied elsewhere."""
    if KV_KIND == KV_E4M3_BITS:
        return e4m3_bits_to_f16(tile).to(dtype)
    return tile.to(dtype)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp2(-2.885390081777927 * x)) - 1.0  # 2 * log2(e)


@triton.jit
def _scores(q, k, scale_log2, soft_cap, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Base-2 logits [M, N] of q [M, D] against k [D, N]."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if HAS_CAP:  # scale_log2 is the plain scale over the cap here, soft_cap carries log2(e)
        return soft_cap * _tanh(scores * scale_log2)
    return scores * scale_log2


@triton.jit
def _absorb(acc, row_max, row_sum, scores, v, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax. A row that has seen nothing yet has row_max = -inf."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # exp2(-inf - -inf) would be NaN
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    acc = acc * rescale[:, None] + tl.dot(weights.to(dtype), v, input_precision=PRECISION)
    return acc, new_max, row_sum


# do_not_specialize: numbers that change from step to step. Otherwise a 1 or a multiple of 16 among them would compile
# a kernel of its own, in the middle of serving. So would, without ..._on_alignment, a pointer into a batch: the rows
# after the decoding ones start anywhere.
@triton.jit(
    do_not_specialize=("window", "table_stride", "num_parts"),
    do_not_specialize_on_alignment=("table_ptr", "seq_lens_ptr", "kv_start_ptr", "lse_ptr"),
)
def paged_decode_kernel(
    out_ptr,  # the first of this kernel's parts of [R, Hq, num_parts, D]: like query, or float32 for a merge
    lse_ptr,  # float32 [R, Hq, num_parts], likewise
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_lens_ptr,  # int32 [R]
    k_scale_ptr,  # float32 [Hkv]
    v_scale_ptr,
    scale_log2,
    soft_cap,
    window,
    kv_start_ptr,  # int32 [1], with HAS_START: tokens before this one are somebody else's part (a shared prefix)
    q_stride,
    table_stride,
    num_parts,  # of a row of the output: as many as there are splits, or more where others write some
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,  # GROUP rounded up to a power of two, at least 16
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two, at least 16
    PAGE: tl.constexpr,  # tokens of a block
    BLOCK_N: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    KV_KIND: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one request, one KV head, one split of its context. Grid (R, Hkv, splits)."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    dtype: tl.constexpr = q_ptr.dtype.element_ty

    seq_len = tl.load(seq_lens_ptr + request)
    first = 0
    if HAS_START:
        first = tl.load(kv_start_ptr)
    if HAS_WINDOW:
        first = tl.maximum(first, seq_len - window)
    first_tile = first // BLOCK_N
    last_tile = tl.cdiv(seq_len, BLOCK_N)
    tiles_each = tl.cdiv(tl.maximum(last_tile - first_tile, 0), tl.num_programs(2))
    low = first_tile + split * tiles_each
    high = tl.minimum(low + tiles_each, last_tile)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    in_group = rows < GROUP
    in_dim = dims < HEAD_DIM
    q_at = request.to(tl.int64) * q_stride + heads * HEAD_DIM
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=in_group[:, None] & in_dim[None, :], other=0.0)
    if HAS_SCALES:
        scale_log2 *= tl.load(k_scale_ptr + kv_head)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    table_row = table_ptr + request.to(tl.int64) * table_stride
    for tile in range(low, high):
        tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        visible = (tokens >= first) & (tokens < seq_len)
        pages = tl.load(table_row + tokens // PAGE, mask=visible, other=0).to(tl.int64)
        at = ((pages * num_kv_heads + kv_head) * PAGE + tokens % PAGE) * HEAD_DIM
        k = tl.load(k_ptr + at[None, :] + dims[:, None], mask=visible[None, :] & in_dim[:, None], other=0.0)
        scores = _scores(q, _operand(k, dtype, KV_KIND), scale_log2, soft_cap, HAS_CAP, PRECISION)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        v = tl.load(v_ptr + at[:, None] + dims[None, :], mask=visible[:, None] & in_dim[None, :], other=0.0)
        acc, row_max, row_sum = _absorb(acc, row_max, row_sum, scores, _operand(v, dtype, KV_KIND), dtype, PRECISION)

    acc /= tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    if HAS_SCALES:
        acc *= tl.load(v_scale_ptr + kv_head)
    out_row = (request.to(tl.int64) * num_kv_heads * GROUP + heads) * num_parts + split
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=in_group[:, None] & in_dim[None, :],
    )
    if WRITE_LSE:
        lse = tl.where(row_sum > 0.0, row_max + tl.log2(tl.where(row_sum > 0.0, row_sum, 1.0)), float("-inf"))
        tl.store(lse_ptr + out_row, lse, mask=in_group)


@triton.jit
def _prefill_tiles(
    acc,
    row_max,
    row_sum,
    q,
    k_ptr,
    v_ptr,
    table_row,
    low,
    high,
    first_seen,
    seq_len,
    row_positions,
    kv_head,
    num_kv_heads,
    scale_log2,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to tiles low..high - 1. Not MASKED: every row sees every token of them.

    Tokens before `first_seen` are outside every row's window and may stand in the null block: not loaded.
    """
    dtype: tl.constexpr = q.dtype
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    for tile in range(low, high):
        tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = (tokens >= first_seen) & (tokens < seq_len)
        pages = tl.load(table_row + tokens // PAGE, mask=exists, other=0).to(tl.int64)
        at = ((pages * num_kv_heads + kv_head) * PAGE + tokens % PAGE) * HEAD_DIM
        if MASKED or HEAD_DIM != BLOCK_D:
            k = tl.load(k_ptr + at[None, :] + dims[:, None], mask=exists[None, :] & in_dim[:, None], other=0.0)
            v = tl.load(v_ptr + at[:, None] + dims[None, :], mask=exists[:, None] & in_dim[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + at[None, :] + dims[:, None])
            v = tl.load(v_ptr + at[:, None] + dims[None, :])
        scores = _scores(q, _operand(k, dtype, KV_KIND), scale_log2, soft_cap, HAS_CAP, PRECISION)
        if MASKED:
            seen = exists[None, :]
            if CAUSAL:
                seen = seen & (tokens[None, :] <= row_positions[:, None])
            if HAS_WINDOW:
                seen = seen & (tokens[None, :] > row_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        acc, row_max, row_sum = _absorb(acc, row_max, row_sum, scores, _operand(v, dtype, KV_KIND), dtype, PRECISION)
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=("window", "table_stride", "num_requests", "num_parts"),
    do_not_specialize_on_alignment=("table_ptr", "seq_lens_ptr", "starts_ptr", "lse_ptr"),
)
def paged_prefill_kernel(
    out_ptr,  # [T, Hq, D]; with IS_PART float32 [T, Hq, num_parts, D]
    lse_ptr,  # with IS_PART: float32 [T, Hq, num_parts]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_lens_ptr,  # int32 [R]
    starts_ptr,  # int32 [R + 1]: absolute token index of each request's first query
    k_scale_ptr,
    v_scale_ptr,
    scale_log2,
    soft_cap,
    window,
    num_requests,
    q_stride,
    table_stride,
    num_parts,  # with IS_PART: of a row of the output
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows: BLOCK_M // GROUP tokens times GROUP heads
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_M // GROUP query tokens of one request, one KV head, one split. Grid (blocks, Hkv, splits).

    The host does not know which request a query block belongs to: block b belongs to the last request r with
    (starts[r] - starts[0]) // BLOCK_Q + r <= b, found by bisection; surplus programs return.

    IS_PART: the context is a prefix that the queries of many requests share, so each sees all of it; it is cut into
    splits as in decode, and what comes out is left for a merge. Otherwise causal, and one split.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP

    base = tl.load(starts_ptr)
    left = 0
    right = num_requests
    while right - left > 1:
        middle = (left + right) // 2
        if (tl.load(starts_ptr + middle) - base) // BLOCK_Q + middle <= block:
            left = middle
        else:
            right = middle
    request = left
    start = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - start
    first_query = (block - ((start - base) // BLOCK_Q + request)) * BLOCK_Q
    if first_query >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + request)
    context = seq_len - query_len  # position of the request's first query token
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (queries < query_len)
    in_dim = dims < HEAD_DIM
    q_at = (start + queries).to(tl.int64) * q_stride + heads * HEAD_DIM
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=is_row[:, None] & in_dim[None, :], other=0.0)
    if HAS_SCALES:
        scale_log2 *= tl.load(k_scale_ptr + kv_head)

    # Tiles that all rows see in full need no mask; the others, at the diagonal and the window's edge, do.
    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    positions = context + queries
    first_seen = 0
    low = 0
    free_low = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(0, context + first_query - window + 1)
        low = first_seen // BLOCK_N
        free_low = tl.cdiv(tl.maximum(0, context + last_query - window + 1), BLOCK_N)
    split = tl.program_id(2)
    if IS_PART:
        last_tile = tl.cdiv(seq_len, BLOCK_N)
        tiles_each = tl.cdiv(last_tile, tl.num_programs(2))
        low = tl.minimum(split * tiles_each, last_tile)
        high = tl.minimum(low + tiles_each, last_tile)
        free_high = seq_len // BLOCK_N
    else:
        high = tl.cdiv(context + last_query + 1, BLOCK_N)
        free_high = (context + first_query + 1) // BLOCK_N
    free_low = tl.minimum(tl.maximum(free_low, low), high)
    free_high = tl.maximum(tl.minimum(free_high, high), free_low)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    table_row = table_ptr + request.to(tl.int64) * table_stride
    if HAS_WINDOW:
        acc, row_max, row_sum = _prefill_tiles(
            acc, row_max, row_sum, q, k_ptr, v_ptr, table_row, low, free_low, first_seen, seq_len, positions, kv_head,
            num_kv_heads, scale_log2, soft_cap, window, HEAD_DIM, BLOCK_D, PAGE, BLOCK_N, True, not IS_PART,
            HAS_WINDOW, HAS_CAP, KV_KIND, PRECISION,
        )  # fmt: skip
    acc, row_max, row_sum = _prefill_tiles(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_row, free_low, free_high, first_seen, seq_len, positions, kv_head,
        num_kv_heads, scale_log2, soft_cap, window, HEAD_DIM, BLOCK_D, PAGE, BLOCK_N, False, not IS_PART,
        HAS_WINDOW, HAS_CAP, KV_KIND, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = _prefill_tiles(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_row, free_high, high, first_seen, seq_len, positions, kv_head,
        num_kv_heads, scale_log2, soft_cap, window, HEAD_DIM, BLOCK_D, PAGE, BLOCK_N, True, not IS_PART,
        HAS_WINDOW, HAS_CAP, KV_KIND, PRECISION,
    )  # fmt: skip

    acc /= tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    if HAS_SCALES:
        acc *= tl.load(v_scale_ptr + kv_head)
    out_row = (start + queries).to(tl.int64) * num_kv_heads * GROUP + heads
    if IS_PART:
        out_row = out_row * num_parts + split
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & in_dim[None, :],
    )
    if IS_PART:
        lse = tl.where(row_sum > 0.0, row_max + tl.log2(tl.where(row_sum > 0.0, row_sum, 1.0)), float("-inf"))
        tl.store(lse_ptr + out_row, lse, mask=is_row)


@triton.jit(do_not_specialize=("num_parts",))
def merge_attention_states_kernel(
    out_ptr,  # [rows, D]
    lse_out_ptr,  # float32 [rows], with WRITE_LSE
    parts_ptr,  # [rows, num_parts, D]
    lse_ptr,  # float32 [rows, num_parts]
    num_parts,
    BLOCK_P: tl.constexpr,  # a power of two, at least num_parts
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """Combine partial attention results of one row (token, head) by their base-2 lse. Grid (rows,).

    Associative: parts of parts may be merged again. A row without any visible token gives 0 and -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_P)
    dims = tl.arange(0, BLOCK_D)
    at = row * num_parts + parts
    lse = tl.load(lse_ptr + at, mask=parts < num_parts, other=float("-inf"))
    top = tl.max(lse, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - shift)
    total = tl.sum(weights, axis=0)
    # A part of weight 0 may hold anything: it is not loaded.
    values = tl.load(
        parts_ptr + at[:, None] * HEAD_DIM + dims[None, :],
        mask=(weights > 0.0)[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    merged = tl.sum(values * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    if WRITE_LSE:
        tl.store(lse_out_ptr + row, tl.where(total > 0.0, shift + tl.log2(tl.maximum(total, 1e-38)), float("-inf")))
