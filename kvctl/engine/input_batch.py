"""What the runner remembers of each running request, and how a step's plan becomes tensors.

Knows no model and no sampling rule. Each request owns one ROW of preallocated numpy arrays (its tokens, its block
table per KV cache group) from admission until it finishes or is preempted; a step is built from whole arrays, so its
cost in Python does not grow with the tokens of a prompt. In the tensors, requests with one query token come first
(as attention wants them); `plan_indices` leads back to the plan's order. Floor 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvctl.core.step import BlockTables, NewRequestData, SchedulerOutput, TokenLogprobs
from kvctl.engine.cascade import CascadeRule, num_shared_blocks
from kvctl.engine.device import upload
from kvctl.engine.ops import AttentionMetadata
from kvctl.engine.sampler import SamplingRow

IntArray = NDArray[np.int64]


class RequestState:
    """One running request as the runner sees it. `token_ids` grows by what is sampled; `sampling` reads it too."""

    __slots__ = (
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "prompt_logprobs",
        "request_id",
        "row",
        "sampling",
        "token_ids",
    )

    def __init__(self, new: NewRequestData, row: int, sampling: SamplingRow) -> None:
        self.request_id = new.request_id
        self.row = row
        self.sampling = sampling
        self.token_ids = new.token_ids
        self.num_prompt_tokens = new.num_prompt_tokens
        self.num_prompt_logprobs = new.sampling_params.prompt_logprobs or 0
        # Collected while the prompt is computed. With output already there this is a readmission after a preemption:
        # they were delivered with the first token.
        wants_prompt = new.sampling_params.prompt_logprobs is not None and len(new.token_ids) == new.num_prompt_tokens
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wants_prompt else None


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens first..last - 1 of the step are prompt tokens of `state`; `targets` are the tokens after each."""

    state: RequestState
    first: int
    last: int
    targets: list[int]  # [last - first]
    is_end: bool  # of the prompt


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, ready for the model. `R` requests, `T` tokens, batch order."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    metadata: tuple[AttentionMetadata, ...]  # per KV cache group
    logit_rows: Tensor | None  # int64 [S]: the tokens whose next one is sampled; None: all T, in order
    sampled: list[RequestState]  # [S], parallel to logit_rows
    sampled_plan_indices: list[int]  # [S]: where each one stands in the plan
    prompt_pieces: list[PromptPiece]
    rows: IntArray  # [R]
    num_scheduled: IntArray  # [R]


class InputBatch:
    """The rows of all running requests. `new_sampling_row` makes the sampler's part of an admitted one.

    `cascade`: when attention reads a prefix once for all requests that share it; None: never, its kernels cannot.

    Invariant: a row's known tokens are `_num_tokens[row]`, of which `_num_computed[row]` are in the cache.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
        new_sampling_row: Callable[[NewRequestData], SamplingRow],
        cascade: CascadeRule | None = None,
    ) -> None:
        self._device = device
        self._cascade = cascade
        self._new_sampling_row = new_sampling_row
        self._block_size = block_size
        self._states: dict[str, RequestState] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # numpy's zero pages cost nothing until touched: long models with many rows are fine. One token and one
        # block of slack: the token sampled at the very last position, and a block given for it.
        self._tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        width = -(-max_model_len // block_size) + 1
        self._tables = [np.zeros((max_num_seqs, width), dtype=np.int32) for _ in range(num_groups)]
        self._num_blocks = [[0] * max_num_seqs for _ in range(num_groups)]
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, plan: SchedulerOutput) -> None:
        """Forget, admit and extend as the plan says, in that order."""
        for request_id in plan.finished_request_ids:
            self._forget(request_id)
        for request_id in plan.preempted_request_ids:
            self._forget(request_id)
        for new in plan.new_requests:
            self._admit(new)
        for request_id, tables in plan.new_block_ids.items():
            self._append_blocks(self._states[request_id].row, tables)

    def _forget(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)  # finished before it ever ran: unknown here
        if state is None:
            return
        row = state.row
        for table, num_blocks in zip(self._tables, self._num_blocks, strict=True):
            table[row, : num_blocks[row]] = 0  # the next owner's unused entries are the null block
            num_blocks[row] = 0
        self._free_rows.append(row)

    def _admit(self, new: NewRequestData) -> None:
        row = self._free_rows.pop()
        self._states[new.request_id] = RequestState(new, row, self._new_sampling_row(new))
        num_tokens = len(new.token_ids)
        self._tokens[row, :num_tokens] = new.token_ids
        self._num_tokens[row] = num_tokens
        self._num_computed[row] = new.num_computed_tokens
        self._append_blocks(row, new.block_tables)

    def _append_blocks(self, row: int, tables: BlockTables) -> None:
        for table, num_blocks, block_ids in zip(self._tables, self._num_blocks, tables, strict=True):
            if block_ids:
                first = num_blocks[row]
                last = first + len(block_ids)
                table[row, first:last] = block_ids
                num_blocks[row] = last

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(array), self._device)

    def build(self, plan: SchedulerOutput) -> StepInputs:
        """Turn the plan, already applied, into tensors."""
        states = [self._states[request_id] for request_id in plan.request_ids]
        counts_list = plan.num_scheduled_tokens
        if max(counts_list) == 1:
            plan_indices = list(range(len(states)))
            num_decode = len(states)
        else:
            plan_indices = sorted(range(len(states)), key=lambda index: counts_list[index] != 1)  # stable
            states = [states[index] for index in plan_indices]
            counts_list = [counts_list[index] for index in plan_indices]
            num_decode = counts_list.count(1)
        rows = np.array([state.row for state in states], dtype=np.int64)
        counts = np.array(counts_list, dtype=np.int64)
        computed = self._num_computed[rows]
        seq_lens = computed + counts
        ends = np.cumsum(counts)
        if num_decode == len(states):
            token_rows, positions = rows, computed
        else:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(ends[-1], dtype=np.int64) + np.repeat(computed - (ends - counts), counts)
        is_sampled = seq_lens == self._num_tokens[rows]
        if is_sampled.all():
            sampled, sampled_plan_indices, sampled_ends = states, plan_indices, ends
        else:
            chosen = np.flatnonzero(is_sampled).tolist()
            sampled = [states[index] for index in chosen]
            sampled_plan_indices = [plan_indices[index] for index in chosen]
            sampled_ends = ends[is_sampled]
        return StepInputs(
            token_ids=self._upload(self._tokens[token_rows, positions]),
            positions=self._upload(positions),
            metadata=self._metadata(rows, counts_list, seq_lens, ends, token_rows, positions, num_decode),
            logit_rows=None if len(sampled) == ends[-1] else self._upload(sampled_ends - 1),
            sampled=sampled,
            sampled_plan_indices=sampled_plan_indices,
            prompt_pieces=self._prompt_pieces(states, computed, counts, ends),
            rows=rows,
            num_scheduled=counts,
        )

    def _metadata(
        self,
        rows: IntArray,
        counts_list: list[int],
        seq_lens: IntArray,
        ends: IntArray,
        token_rows: IntArray,
        positions: IntArray,
        num_decode: int,
    ) -> tuple[AttentionMetadata, ...]:
        seq_lens_list = seq_lens.tolist()
        max_seq_len = max(seq_lens_list)
        width = -(-max_seq_len // self._block_size)
        starts = np.zeros(len(rows) + 1, dtype=np.int32)
        starts[1:] = ends
        query_start_loc = self._upload(starts)
        seq_lens_tensor = self._upload(seq_lens.astype(np.int32))
        max_query_len = max(counts_list)
        block_of_token, offsets = np.divmod(positions, self._block_size)
        found: list[AttentionMetadata] = []
        for group, table in enumerate(self._tables):
            blocks = table[token_rows, block_of_token].astype(np.int64)
            slots = np.where(blocks == 0, -1, blocks * self._block_size + offsets)
            own_tables = table[rows, :width]
            found.append(
                AttentionMetadata(
                    block_tables=self._upload(own_tables),
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens_tensor,
                    slot_mapping=self._upload(slots),
                    num_decode_requests=num_decode,
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                    query_lens_list=counts_list,
                    seq_lens_list=seq_lens_list,
                    shared_prefix=self._shared_prefix(group, own_tables[:num_decode], seq_lens[:num_decode]),
                )
            )
        return tuple(found)

    def _shared_prefix(self, group: int, tables: NDArray[np.int32], seq_lens: IntArray) -> Tensor | None:
        """What the decode requests have in common, if reading it once pays."""
        if self._cascade is None or group not in self._cascade.groups or len(tables) < 2:
            return None
        shared_tokens = self._block_size * num_shared_blocks(tables, int(seq_lens.min()), self._block_size)
        if not self._cascade.pays(len(tables), shared_tokens):
            return None
        return self._upload(np.array([0, len(tables), shared_tokens], dtype=np.int32))

    def _prompt_pieces(
        self, states: list[RequestState], computed: IntArray, counts: IntArray, ends: IntArray
    ) -> list[PromptPiece]:
        """Prompt tokens of this step whose successor is a prompt token too."""
        pieces: list[PromptPiece] = []
        for index, state in enumerate(states):
            if state.prompt_logprobs is None:
                continue
            begin, count, end = int(computed[index]), int(counts[index]), int(ends[index])
            length = min(begin + count, state.num_prompt_tokens - 1) - begin
            pieces.append(
                PromptPiece(
                    state=state,
                    first=end - count,
                    last=end - count + max(0, length),
                    targets=state.token_ids[begin + 1 : begin + 1 + max(0, length)],
                    is_end=begin + count >= state.num_prompt_tokens,
                )
            )
        return pieces

    def advance(self, inputs: StepInputs, token_ids: list[int]) -> None:
        """The step is done: its tokens are in the cache, `token_ids` [S] were sampled."""
        self._num_computed[inputs.rows] += inputs.num_scheduled
        if not token_ids:
            return
        sampled_rows = [state.row for state in inputs.sampled]
        self._tokens[sampled_rows, self._num_tokens[sampled_rows]] = token_ids
        self._num_tokens[sampled_rows] += 1
        for state, token_id in zip(inputs.sampled, token_ids, strict=True):
            state.token_ids.append(token_id)
