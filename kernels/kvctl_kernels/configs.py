"""Launch configurations by architecture, head size and cache dtype: a table, not an autotuner.

A table gives the same kernel on every start (determinism, CUDA graphs), compiles nothing twice and can be checked
without a GPU: `scripts/kernel_report.py` compiles every row for every architecture and reads registers, spills,
shared memory and instructions off the result. Imports neither torch nor triton.

What the rows come from (compiled, not yet timed on a GPU): 4 warps spill in prefill at BLOCK_M 128; behind the load
of a block table the pipeliner double-buffers K and V only at num_stages 5; float32 takes three products and twice the
bytes, so few rows fit; shared memory allows 99 KB (sm_120; sm_86 and sm_89, which take the rows of sm_80), 227 KB
(sm_90, sm_100), 64 KB (gfx942).
"""

from dataclasses import dataclass
from typing import Literal

Arch = Literal["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"]
ARCHS: tuple[Arch, ...] = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
SHARED_LIMIT_BYTES: dict[Arch, int] = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}
# sm_86 and sm_89 (A10, RTX 30 and 40, L4, L40S) are served by the rows of sm_80 and have less than it.
SMALLEST_SM8X_BYTES = 99 * 1024
MIN_ROWS = 16  # tl.dot wants at least 16 rows, and as many columns
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """One row of the table. `block_m` counts rows: query tokens times the heads of a group."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def arch_of(capability: tuple[int, int], is_hip: bool) -> Arch:
    """The row of the table for a device; the next older one where there is none of its own."""
    if is_hip:
        return "gfx942"
    major = capability[0]
    return "sm_120" if major >= 12 else "sm_100" if major >= 10 else "sm_90" if major >= 9 else "sm_80"


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def block_dim(head_dim: int) -> int:
    """Columns of a tile that holds a head."""
    return max(MIN_ROWS, next_power_of_2(head_dim))


def dot_precision(arch: Arch, is_float32: bool) -> str:
    """How `tl.dot` multiplies float32 operands as float32: as three TF32 products, or plainly where that is unknown.

    Without a word NVIDIA parts would take one TF32 product, which keeps three digits. 16-bit operands do not care.
    """
    if arch == "gfx942":
        return "ieee"
    return "tf32x3" if is_float32 else "tf32"


def decode_config(arch: Arch, head_dim: int, kv_bytes: int, group: int) -> AttentionConfig:
    """Configuration of `paged_decode` for pages of `kv_bytes` (1, 2 or 4) per number."""
    block_m = max(MIN_ROWS, next_power_of_2(group))
    wide = head_dim > 128
    # Deep pipelines want shared memory for two K and two V tiles of BLOCK_N x head_dim beside the dot operands.
    if arch == "gfx942":
        return AttentionConfig(block_m, 16 if wide and kv_bytes == 4 else 32 if wide or kv_bytes == 4 else 64, 4, 2)
    if kv_bytes == 4:
        return AttentionConfig(block_m, 16 if head_dim > 64 else 32, 8 if head_dim > 64 else 4, 3)
    if wide:
        return AttentionConfig(block_m, 32, 4, 5)
    small_shared = arch == "sm_120" and head_dim > 64 and kv_bytes == 2
    return AttentionConfig(block_m, 32 if small_shared else 64, 4, 5)


def prefill_config(
    arch: Arch, head_dim: int, kv_bytes: int, group: int, *, is_special: bool = False
) -> AttentionConfig:
    """Configuration of `paged_prefill`. `is_special`: a window, a soft cap or a part of a context: more registers."""
    minimum = max(MIN_ROWS, next_power_of_2(group))
    wide = head_dim > 128
    masked = head_dim != next_power_of_2(head_dim)  # the masks of a padded head take registers too
    if arch == "gfx942":
        is_tight = kv_bytes == 4 or (kv_bytes == 1 and is_special)
        rows = 32 if wide and is_tight else 64 if wide or masked or is_special else 128
        return AttentionConfig(
            max(minimum, rows), 16 if wide and kv_bytes == 4 else 32 if wide or is_tight else 64, 8, 1
        )
    if kv_bytes == 4:  # three products each, and twice the bytes
        if head_dim > 64:
            return AttentionConfig(minimum, 16, 8, 2)
        return AttentionConfig(max(minimum, 32), 32, 8, 2)
    # Converting one-byte pages costs registers: without the big register files of sm_90 and sm_100 fewer rows fit.
    few_registers = arch in ("sm_80", "sm_120")
    if wide:
        if arch == "sm_120" and kv_bytes == 1:
            return AttentionConfig(max(minimum, 64), 16, 8, 2)  # 32 keys at a time spill there
        stages = 3 if arch == "sm_100" and kv_bytes == 2 else 2  # two spill there
        return AttentionConfig(max(minimum, 32 if few_registers and kv_bytes == 1 else 64), 32, 8, stages)
    if head_dim > 64:
        if few_registers and is_special and kv_bytes == 2:
            return AttentionConfig(max(minimum, 64), 32, 4, 3)
        uneven = arch == "sm_80" and group != next_power_of_2(group)  # dividing rows by 3 or 7 spills there
        rows = 64 if few_registers and (kv_bytes == 1 or masked or uneven) else 128
        return AttentionConfig(max(minimum, rows), 32 if arch == "sm_120" else 64, 8, 3)
    return AttentionConfig(max(minimum, 128), 64, 8, 3)


def num_splits(num_requests: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """How many parts the context of each request is cut into, so that a small batch still fills the GPU.

    Depends on the batch size alone, never on lengths: it must not change between replays of a CUDA graph.
    """
    wanted = 2 * num_multiprocessors // max(1, num_requests * num_kv_heads)
    return max(1, min(MAX_SPLITS, next_power_of_2(wanted + 1) // 2))


def prefix_splits(num_requests: int, group: int, block_m: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """How many parts a prefix shared by `num_requests` is cut into: one program per multiprocessor, as large ones are.

    Like `num_splits` it depends on no length.
    """
    query_blocks = -(-num_requests // (block_m // group))
    return num_splits(query_blocks, num_kv_heads, num_multiprocessors // 2)
