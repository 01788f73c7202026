"""Decode steps as captured graphs: one launch replays all kernels of a step over tensors that never move.

A graph is captured per batch size of a ladder, largest first, all from one memory pool; a step runs the smallest that
holds it, padded with rows that store nothing (slot -1) and read one token of the null block. Knows no scheduler and
no sampling. Invariants: the static tensors live as long as the graphs; whatever a captured kernel needs to know of
lengths it reads from them, on the device. Floor 2.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvctl.engine.input_batch import StepInputs
from kvctl.engine.kv_cache import LayerKV
from kvctl.engine.models.decoder import Decoder
from kvctl.engine.ops import AttentionMetadata

_WARM_UP_RUNS = 2  # before capture: Triton compiles, cuBLAS picks its workspaces


class GraphBackend(Protocol):
    """Captures work once, replays it often."""

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture what `run` does; return how to replay it and the tensor that then holds its result."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Warm up on a side stream, then capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        return graph.replay, output


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The ladder of batch sizes up to `max_num_seqs`: 1, 2, 4, then steps of 8, of 16 beyond 256, of 32 beyond 512.

    Padding costs less than 8 rows below 256, and a capture some 0.1 s: the ladder is where both stay small.
    """
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1025, 32)]
    largest = min(max_num_seqs, ladder[-1])
    return [*(size for size in ladder if size < largest), largest]


class _Lengths(Sequence[int]):
    """The list twin of a static length tensor: reads it when asked. Captured kernels never ask; torch's ops do."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def __getitem__(self, index: Any) -> Any:
        return self._tensor[index].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._tensor.tolist())


class DecodeGraphs:
    """The graphs of one model over one KV cache.

    Args:
        sizes: batch sizes to capture.
        max_blocks: width of the block tables, for the longest sequence.
        num_groups: KV cache groups.
    """

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[LayerKV],
        backend: GraphBackend,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers
        self._max_seq_len = max_blocks * block_size
        self._sizes = sorted(sizes)
        rows = self._sizes[-1]

        def static(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids = static(rows, dtype=torch.int64)
        self._positions = static(rows, dtype=torch.int64)
        self._seq_lens = torch.ones(rows, dtype=torch.int32, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._slots = [torch.full((rows,), -1, dtype=torch.int64, device=device) for _ in range(num_groups)]
        self._tables = [static(rows, max_blocks, dtype=torch.int32) for _ in range(num_groups)]
        self._graphs = {size: backend.capture(partial(self._run, size)) for size in reversed(self._sizes)}

    def _run(self, size: int) -> Tensor:
        metadata = [
            AttentionMetadata(
                block_tables=tables[:size],
                query_start_loc=self._starts[: size + 1],
                seq_lens=self._seq_lens[:size],
                slot_mapping=slots[:size],
                num_decode_requests=size,
                max_query_len=1,
                max_seq_len=self._max_seq_len,
                query_lens_list=[1] * size,
                seq_lens_list=_Lengths(self._seq_lens[:size]),
            )
            for tables, slots in zip(self._tables, self._slots, strict=True)
        ]
        added, residual = self._model.forward(self._token_ids[:size], self._positions[:size], self._kv_layers, metadata)
        return self._model.logits(added, residual)

    def holds(self, inputs: StepInputs) -> bool:
        """Whether a step is pure decoding and small enough: every token's successor is sampled, nothing else asked."""
        return (
            inputs.metadata[0].max_query_len == 1
            and len(inputs.rows) <= self._sizes[-1]
            and inputs.logit_rows is None
            and not inputs.prompt_pieces
        )

    def logits(self, inputs: StepInputs) -> Tensor:
        """Replay the step; returns [num_requests, vocab_size], valid until the next call."""
        count = len(inputs.rows)
        size = next(size for size in self._sizes if size >= count)
        self._token_ids[:count].copy_(inputs.token_ids, non_blocking=True)
        self._positions[:count].copy_(inputs.positions, non_blocking=True)
        self._seq_lens[:count].copy_(inputs.metadata[0].seq_lens, non_blocking=True)
        self._seq_lens[count:size].fill_(1)
        self._positions[count:size].zero_()
        for tables, slots, meta in zip(self._tables, self._slots, inputs.metadata, strict=True):
            tables[:count, : meta.block_tables.shape[1]].copy_(meta.block_tables, non_blocking=True)
            tables[count:size, :1].zero_()
            slots[:count].copy_(meta.slot_mapping, non_blocking=True)
            slots[count:size].fill_(-1)
        replay, output = self._graphs[size]
        replay()
        return output[:count]
