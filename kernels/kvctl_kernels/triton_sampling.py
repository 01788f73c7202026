"""Random choice of a token on a GPU, in one pass over the logits instead of the twenty operations of plain torch.

The same race with the same noise as `kvctl.engine.sampler_random.race`: a token's noise depends on the request's key
and the token id alone. Filters (top_k, top_p, min_p) look at few tokens and stay in torch: one kernel for them would
pass over the vocabulary once per step of a bisection. Knows rows of numbers only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
MAX_PARTS = 16  # programs per row, so that one row does not run on one multiprocessor


@triton.jit
def _mix32(x):
    """Scramble uint32. Source of the constants: C. Wellons' hash prospector, "lowbias32"."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(token_ids, low, high):
    """-log E with E = -log(1 - u) exponential; the winners have a small u, where a series keeps all bits."""
    bits = _mix32(_mix32(token_ids.to(tl.uint32) ^ low) ^ high)
    u = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 2**-32, 2**-33
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))


@triton.jit
def race_kernel(
    best_ptr,  # float32 [R, parts]
    token_ptr,  # int64 [R, parts]
    scaled_ptr,  # float32 [R, V], rows row_stride apart
    keys_ptr,  # int64 [R, 2]: low and high half of the key
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """The best of one part of one row. Grid (R, parts); of equal scores the first token wins."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    low = tl.load(keys_ptr + 2 * row).to(tl.uint32)
    high = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32)
    blocks = tl.cdiv(tl.cdiv(vocab_size, BLOCK), parts)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    token = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(part * blocks, (part + 1) * blocks):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(scaled_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
        score = x + _noise(ids, low, high)
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, ids, token)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, token, vocab_size), axis=0)
    tl.store(best_ptr + row * parts + part, top)
    tl.store(token_ptr + row * parts + part, winner.to(tl.int64))


def race(scaled: Tensor, keys: Tensor) -> Tensor:
    """Draw from softmax(scaled) per row, int64 [R]: scaled float32 [R, V], keys int64 [R, 2]."""
    num_rows, vocab_size = scaled.shape
    parts = min(MAX_PARTS, triton.cdiv(vocab_size, BLOCK))
    best = torch.empty((num_rows, parts), dtype=torch.float32, device=scaled.device)
    token = torch.empty((num_rows, parts), dtype=torch.int64, device=scaled.device)
    if num_rows:
        race_kernel[(num_rows, parts)](
            best, token, scaled, keys, scaled.stride(0), vocab_size, BLOCK=BLOCK, num_warps=4
        )
    return token.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)
