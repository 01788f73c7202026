"""What attention needs to know about a batch: who owns which token, and where its keys and values lie.

Knows no model and no scheduler: lengths, block ids and slots only. One object per KV cache group and step; all
layers of the group share it.

Invariants:
    requests with exactly one query token that are decoding come first (`num_decode_requests` of them);
    the query tokens of a request are its LAST ones: token i of request r stands at position
    `seq_lens[r] - query_lens[r] + i` of its sequence;
    block 0 is the null block: an unused entry of `block_tables`, or one that fell out of a sliding window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVScales:
    """What stored float8 numbers are multiplied with to be keys and values again: float32 [num_kv_heads] each."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Batch of `R` requests and `T` query tokens. The `_list` twins spare a read from the device."""

    block_tables: Tensor  # int32 [R, max_blocks], rows contiguous
    query_start_loc: Tensor  # int32 [R + 1]: tokens query_start_loc[r] .. query_start_loc[r + 1] belong to r
    seq_lens: Tensor  # int32 [R]: tokens in the cache once this step's are stored
    slot_mapping: Tensor  # int64 [T]: block_id * block_size + offset; -1: do not store
    num_decode_requests: int
    max_query_len: int
    max_seq_len: int
    query_lens_list: Sequence[int]
    seq_lens_list: Sequence[int]
    # int32 [3]: 0, num_decode_requests, tokens of the whole blocks that all of them start with. None: no such blocks,
    # too few to matter, or not looked for.
    shared_prefix: Tensor | None = None

    @classmethod
    def from_lists(
        cls,
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "AttentionMetadata":
        """Build it from plain lists: the readable way, for tests and small tools (O(tokens) in Python).

        Raises:
            ValueError: the lists contradict each other.
        """
        if not len(block_tables) == len(query_lens) == len(seq_lens):
            raise ValueError("block_tables, query_lens and seq_lens differ in length")
        width = max((len(row) for row in block_tables), default=0)
        starts = [0]
        slots: list[int] = []
        num_decode, still_decode = 0, True
        for row, query_len, seq_len in zip(block_tables, query_lens, seq_lens, strict=True):
            if not 1 <= query_len <= seq_len <= len(row) * block_size:
                raise ValueError(f"{query_len} query tokens of {seq_len} do not fit {len(row)} blocks of {block_size}")
            starts.append(starts[-1] + query_len)
            slots += [
                row[position // block_size] * block_size + position % block_size
                for position in range(seq_len - query_len, seq_len)
            ]
            still_decode = still_decode and query_len == 1
            num_decode += still_decode
        padded = [list(row) + [0] * (width - len(row)) for row in block_tables]
        return cls(
            block_tables=torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(padded), width),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            num_decode_requests=num_decode,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            query_lens_list=list(query_lens),
            seq_lens_list=list(seq_lens),
        )
