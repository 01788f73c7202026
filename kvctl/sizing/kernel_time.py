"""How long a kernel should take: bytes and FLOPs of the operation over the ceilings of the machine.

Knows no kernel code: what an operation must move and compute at least, whoever computes it. A prediction is the larger
of the two times plus one launch; measured time over prediction is what an implementation loses. `kvctl size` predicts
whole steps with it (`speed`), scripts/gpu_check.py prints it beside what it measures. Floor 1.
"""

from dataclasses import dataclass

LAUNCH_S = 3e-6  # one kernel behind another on a stream; NVIDIA parts, order of magnitude


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine reaches at best: measured copy rate (read plus write) and dense 16-bit matmul rate."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation needs: bytes moved to or from memory, floating point operations, launches."""

    num_bytes: float
    flop: float
    launches: int = 1

    def seconds(self, ceilings: Ceilings) -> float:
        """Roofline: the slower of moving and computing, and the launches."""
        return max(self.num_bytes / ceilings.bytes_per_s, self.flop / ceilings.flop_per_s) + self.launches * LAUNCH_S


def decode_work(
    seq_lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, kv_bytes: int, *, shared_tokens: int = 0
) -> Work:
    """Attention of one query per request over its context; the shared prefix of all of them is read once."""
    own_tokens = sum(length - shared_tokens for length in seq_lens)
    read = (own_tokens + shared_tokens) * 2 * num_kv_heads * head_dim * kv_bytes
    in_and_out = 2 * len(seq_lens) * num_heads * head_dim * 2
    flop = 4 * sum(seq_lens) * num_heads * head_dim
    return Work(read + in_and_out, flop, launches=4 if shared_tokens else 2)


def prefill_work(
    query_lens: list[int], seq_lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, kv_bytes: int
) -> Work:
    """Causal attention of the last `query_lens[r]` tokens of each request."""
    read = sum(seq_lens) * 2 * num_kv_heads * head_dim * kv_bytes
    in_and_out = 2 * sum(query_lens) * num_heads * head_dim * 2
    pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in zip(query_lens, seq_lens, strict=True))
    return Work(read + in_and_out, 4 * pairs * num_heads * head_dim)


def store_kv_work(num_tokens: int, num_kv_heads: int, head_dim: int, kv_bytes: int) -> Work:
    """Write K and V of some tokens: 16-bit numbers in, `kv_bytes` each out."""
    return Work(num_tokens * 2 * num_kv_heads * head_dim * (2 + kv_bytes), 0)


def rows_work(num_rows: int, row_reads: int, row_writes: int) -> Work:
    """A pass over rows of 16-bit numbers: norms, gates, rotary."""
    return Work(num_rows * (row_reads + row_writes) * 2, 0)
