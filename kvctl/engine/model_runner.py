"""One step on the model: the plan becomes tensors, the tensors logits, the logits tokens.

Knows no scheduler and no text. Logits are computed only for tokens whose successor is sampled or whose prompt
logprobs were asked for. On a GPU the only wait for the device is for the sampled tokens. Floor 2.
"""

from functools import partial

import torch
from torch import Tensor

from kvctl.core.step import ModelRunnerOutput, NewRequestData, SchedulerOutput, TokenLogprobs
from kvctl.engine.cascade import CascadeRule
from kvctl.engine.decode_graphs import DecodeGraphs
from kvctl.engine.input_batch import InputBatch, RequestState, StepInputs
from kvctl.engine.kv_cache import KVCache
from kvctl.engine.logprobs import token_logprobs
from kvctl.engine.models.decoder import Decoder
from kvctl.engine.sampler import Sampler, SamplingBatch, SamplingRow

_PROMPT_LOGIT_ROWS = 64  # scored at once: bounds the logits of a long prompt


def _new_sampling_row(sampler: Sampler, new: NewRequestData) -> SamplingRow:
    return sampler.new_row(new.sampling_params, new.token_ids, new.num_prompt_tokens, new.eos_token_ids)


class TorchModelRunner:
    """Runs a decoder over its KV cache; keeps the state of the running requests between steps."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        sampler: Sampler,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_groups: int,
        device: torch.device,
        decode_graphs: DecodeGraphs | None = None,
        cascade: CascadeRule | None = None,
    ) -> None:
        self._model = model
        self._decode_graphs = decode_graphs
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=kv_cache.block_size,
            num_groups=num_groups,
            device=device,
            new_sampling_row=partial(_new_sampling_row, sampler),  # no method of this object: it would hold itself
            cascade=cascade,
        )
        self._sampled: list[RequestState] = []  # of the step before: mostly the same ones again
        self._sampling_batch = SamplingBatch([])

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the plan's tokens and sample for every request whose last known token is among them."""
        self._batch.apply(plan)
        output = ModelRunnerOutput([None] * len(plan.request_ids))
        if plan.is_empty:
            return output
        inputs = self._batch.build(plan)
        if self._decode_graphs is not None and self._decode_graphs.holds(inputs):
            logits = self._decode_graphs.logits(inputs)
        else:
            logits = self._logits(inputs, output)
        token_ids = self._sample(logits, inputs, output) if inputs.sampled else []
        self._batch.advance(inputs, token_ids)
        return output

    def _logits(self, inputs: StepInputs, output: ModelRunnerOutput) -> Tensor:
        """Run the model; return scores of the rows to sample from. Prompt logprobs that are complete go to `output`."""
        scored = inputs.prompt_pieces  # their tokens' results are needed, too
        added, residual = self._model.forward(
            inputs.token_ids,
            inputs.positions,
            self._kv_cache.layers,
            inputs.metadata,
            None if scored else inputs.logit_rows,
        )
        if scored:
            output.prompt_logprobs = self._prompt_logprobs(inputs, added, residual)
            if inputs.logit_rows is not None:
                added, residual = added.index_select(0, inputs.logit_rows), residual.index_select(0, inputs.logit_rows)
        return self._model.logits(added, residual)

    def _sample(self, logits: Tensor, inputs: StepInputs, output: ModelRunnerOutput) -> list[int]:
        if inputs.sampled != self._sampled:
            self._sampled = inputs.sampled
            self._sampling_batch = SamplingBatch([state.sampling for state in inputs.sampled])
        result = self._sampler.sample(logits, self._sampling_batch)
        for plan_index, token_id in zip(inputs.sampled_plan_indices, result.token_ids, strict=True):
            output.sampled_token_ids[plan_index] = token_id
        if result.logprobs is not None:
            for state, entry in zip(inputs.sampled, result.logprobs, strict=True):
                if entry is not None:
                    output.logprobs[state.request_id] = entry
        return result.token_ids

    def _prompt_logprobs(
        self, inputs: StepInputs, added: Tensor, residual: Tensor
    ) -> dict[str, list[TokenLogprobs | None]]:
        """Collect this step's part; return those that are complete."""
        complete: dict[str, list[TokenLogprobs | None]] = {}
        for piece in inputs.prompt_pieces:
            state = piece.state
            assert state.prompt_logprobs is not None  # there would be no piece
            for first in range(piece.first, piece.last, _PROMPT_LOGIT_ROWS):
                last = min(first + _PROMPT_LOGIT_ROWS, piece.last)
                targets = piece.targets[first - piece.first : last - piece.first]
                logits = self._model.logits(added[first:last], residual[first:last])
                state.prompt_logprobs += token_logprobs(logits, targets, [state.num_prompt_logprobs] * len(targets))
            if piece.is_end:
                complete[state.request_id] = state.prompt_logprobs
                state.prompt_logprobs = None
        return complete
