"""Decode steps as captured graphs: one launch replays all kernels of a step over tensors that never move.

A graph is captured per batch size of a ladder, largest first, all from one memory pool; a step runs the smallest that
holds it, padded with rows that store nothing (slot -1) and read one token of the null block. Steps over a long shared
prefix have a ladder of their own. Knows no scheduler and no sampling. Invariants: the static tensors live as long as
the graphs; whatever a captured kernel needs to know of lengths it reads from them, on the device. Floor 2.
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

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture what `run` does to tensors that stay in place; return how to replay it."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool: what one needs beside the static tensors, the next one reuses."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warm up on a side stream, then capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The ladder of batch sizes up to `max_num_seqs`: 1, 2, 4, then steps of 8, of 16 beyond 256, of 32 beyond 512.

    Padding costs less than 8 rows below 256, and a capture some 0.1 s: the ladder is where both stay small.
    """
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1025, 32)]
    largest = min(max_num_seqs, ladder[-1])
    return [*(size for size in ladder if size < largest), largest]


def cascade_sizes(sizes: Sequence[int]) -> list[int]:
    """The coarser ladder of steps over a shared prefix: the powers of two from 2 on, and the largest size."""
    return [size for size in sizes if size > 1 and (size & (size - 1) == 0 or size == sizes[-1])]


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
        cascade_groups: those that can read a shared prefix once; with some, the steps are captured that way too.
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
        cascade_groups: Sequence[int] = (),
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
        self._shared = {group: static(3, dtype=torch.int32) for group in cascade_groups}
        scores = self._compute(1, False)
        # One tensor for the scores of all graphs: what a graph itself returns would be kept for each of them.
        self._logits = torch.empty((rows, scores.shape[1]), dtype=scores.dtype, device=device)
        self._graphs = {size: backend.capture(partial(self._run, size, False)) for size in reversed(self._sizes)}
        self._cascade_sizes = cascade_sizes(self._sizes) if cascade_groups else []
        self._cascades = {
            size: backend.capture(partial(self._run, size, True)) for size in reversed(self._cascade_sizes)
        }

    @property
    def num_graphs(self) -> int:
        """How many were captured."""
        return len(self._graphs) + len(self._cascades)

    def _run(self, size: int, is_cascade: bool) -> None:
        self._logits[:size].copy_(self._compute(size, is_cascade))

    def _compute(self, size: int, is_cascade: bool) -> Tensor:
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
                shared_prefix=self._shared.get(group) if is_cascade else None,
            )
            for group, (tables, slots) in enumerate(zip(self._tables, self._slots, strict=True))
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
        found = ((shared, inputs.metadata[group].shared_prefix) for group, shared in self._shared.items())
        prefixes = [(shared, prefix) for shared, prefix in found if prefix is not None]
        is_cascade = bool(prefixes) and len(prefixes) == len(self._shared)
        size = next(size for size in (self._cascade_sizes if is_cascade else self._sizes) if size >= count)
        if is_cascade:
            for shared, prefix in prefixes:
                shared.copy_(prefix, non_blocking=True)
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
        (self._cascades if is_cascade else self._graphs)[size]()
        return self._logits[:count]
