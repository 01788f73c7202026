"""Which token comes next, for a whole batch at once.

How the runner uses it:

    row = sampler.new_row(params, token_ids, num_prompt_tokens, eos_token_ids)   # once, at admission; `token_ids` is
                                                  # the runner's live list (prompt, output so far): append to it
    batch = SamplingBatch(rows)                   # keep it as long as the same rows sample in the same order
    output = sampler.sample(logits, batch)        # logits [R, V]: one row per SamplingRow
    row.token_ids.append(token)                   # the runner's list, for every row; nothing else to tell

Building a batch is O(rows) and touches no tensor when all are greedy; that case is one argmax.

Knows logits and rows: no blocks, no scheduler, no text. Invariant: a row's token depends on its own logits, params
and tokens only, bit for bit, whatever else is in the batch. Floor 2.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import TokenLogprobs
from kvctl.engine.config import CpuKernels
from kvctl.engine.device import upload
from kvctl.engine.logprobs import token_logprobs
from kvctl.engine.sampler_random import filtered_race, keys_tensor, mix64, race, token_key
from kvctl.engine.sampler_row import SamplingRow
from kvctl_kernels.cpu_build import NativeUnavailable, load_native
from kvctl_kernels.cpu_sampling import NativeSampling

__all__ = ["Sampler", "SamplerOutput", "SamplingBatch", "SamplingKernels", "SamplingRow", "select_sampling"]


class SamplingKernels(Protocol):
    """The two operations that look at every token of the vocabulary."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Index of the largest logit of each row [R, V], the first of equal ones: int64 [R]."""

    def draw(self, scaled: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Draw a token per row, as `sampler_random.filtered_race` describes."""


class TorchSampling:
    """Plain torch, on any device; `race` draws where nothing is filtered."""

    def __init__(self, race: Callable[[Tensor, Tensor], Tensor] = race) -> None:
        self._race = race

    def argmax(self, logits: Tensor) -> Tensor:
        """See `SamplingKernels`."""
        return logits.argmax(dim=-1)

    def draw(self, scaled: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """See `SamplingKernels`."""
        filtered = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
        limited, free = filtered.nonzero().squeeze(1), (~filtered).nonzero().squeeze(1)
        tokens = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
        if len(free):
            tokens[free] = self._race(scaled[free], keys[free])
        if len(limited):
            tokens[limited] = filtered_race(
                scaled[limited], keys[limited], top_k[limited], top_p[limited], min_p[limited]
            )
        return tokens


def select_sampling(
    device: torch.device | str, cpu_kernels: CpuKernels = "auto", num_threads: int | None = None
) -> SamplingKernels:
    """Choose as `select_ops` does; where the native kernels cannot be had, `select_ops` has told why already."""
    if torch.device(device).type == "cuda":
        return _cuda_sampling()
    if torch.device(device).type != "cpu" or cpu_kernels == "torch":
        return TorchSampling()
    try:
        return NativeSampling(load_native(), num_threads or torch.get_num_threads())
    except NativeUnavailable:
        return TorchSampling()


def _cuda_sampling() -> SamplingKernels:
    try:
        from kvctl_kernels import triton_sampling
    except ImportError:
        return TorchSampling()
    return TorchSampling(triton_sampling.race)


@dataclass(slots=True)
class SamplerOutput:
    """`token_ids` is parallel to the batch's rows; so is `logprobs`, None when no row asked for any."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None


class SamplingBatch:
    """The rows that sample together, sorted into what has to be done to them. Reusable while the rows are the same."""

    __slots__ = (
        "greedy",
        "is_plain_greedy",
        "min_p",
        "processed",
        "random",
        "rows",
        "temperatures",
        "top_k",
        "top_p",
        "with_logprobs",
        "worked",
    )

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        self.rows = rows
        self.with_logprobs = [i for i, row in enumerate(rows) if row.num_logprobs is not None]
        self.worked = [i for i, row in enumerate(rows) if not row.is_plain_greedy]
        self.is_plain_greedy = not self.worked
        if self.is_plain_greedy:
            return
        # From here on indices count within `worked`.
        worked = [rows[i] for i in self.worked]
        self.processed = [i for i, row in enumerate(worked) if row.is_processed]
        self.greedy = [i for i, row in enumerate(worked) if row.is_greedy]
        self.random = [i for i, row in enumerate(worked) if not row.is_greedy]
        drawn = [worked[i].params for i in self.random]
        self.temperatures = torch.tensor([1.0 if row.is_greedy else row.params.temperature for row in worked])
        self.top_k = torch.tensor([params.top_k for params in drawn], dtype=torch.int64)
        self.top_p = torch.tensor([params.top_p for params in drawn])
        self.min_p = torch.tensor([params.min_p for params in drawn])


class Sampler:
    """Draws tokens. `seed` is the engine's: unseeded requests get their streams from it, in order of arrival."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        kernels: SamplingKernels | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels or TorchSampling()
        self._device = torch.device(device)
        self._seed = mix64(seed ^ 0x6B7663746C)  # apart from a request that gives the same number as its seed
        self._num_unseeded = 0

    def new_row(
        self, params: SamplingParams, token_ids: list[int], num_prompt_tokens: int, eos_token_ids: Iterable[int]
    ) -> SamplingRow:
        """Make ready what one request needs. `token_ids`: the caller's live list of prompt and output tokens."""
        if params.seed is not None:
            key = params.seed
        else:
            key = mix64(self._seed + self._num_unseeded)
            self._num_unseeded += 1
        return SamplingRow(
            params,
            token_ids,
            num_prompt_tokens,
            eos_token_ids,
            key=key,
            vocab_size=self._vocab_size,
            device=self._device,
        )

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Choose a token per row: logits [R, V], float32 or the model's dtype; they are not changed."""
        if batch.is_plain_greedy:
            token_ids: list[int] = self._kernels.argmax(logits).tolist()
        else:
            token_ids = self._sample_mixed(logits, batch)
        return SamplerOutput(token_ids, self._logprobs(logits, batch, token_ids) if batch.with_logprobs else None)

    def _sample_mixed(self, logits: Tensor, batch: SamplingBatch) -> list[int]:
        everything = len(batch.worked) == len(batch.rows)
        chosen = torch.empty(len(batch.rows), dtype=torch.int64) if everything else self._kernels.argmax(logits).cpu()
        picked = _take(logits, batch.worked)
        scaled = picked.to(torch.float32, copy=True)
        rows = [batch.rows[i] for i in batch.worked]
        for i in batch.processed:
            rows[i].process(scaled[i])
        scaled /= upload(batch.temperatures, scaled.device).unsqueeze(1)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=scaled.device)
        if batch.greedy:
            tokens[_index(batch.greedy, tokens.device)] = self._kernels.argmax(_take(scaled, batch.greedy))
        if batch.random:
            tokens[_index(batch.random, tokens.device)] = self._kernels.draw(
                _take(scaled, batch.random),
                self._keys(rows, batch.random),
                upload(batch.top_k, scaled.device),
                upload(batch.top_p, scaled.device),
                upload(batch.min_p, scaled.device),
            )
        chosen[batch.worked] = tokens.cpu()
        result: list[int] = chosen.tolist()
        return result

    def _keys(self, rows: Sequence[SamplingRow], indices: Sequence[int]) -> Tensor:
        return keys_tensor([token_key(rows[i].key, rows[i].num_output_tokens) for i in indices], self._device)

    def _logprobs(self, logits: Tensor, batch: SamplingBatch, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        wanted = batch.with_logprobs
        described = token_logprobs(
            logits if len(wanted) == len(batch.rows) else logits[wanted],
            [token_ids[i] for i in wanted],
            [batch.rows[i].num_logprobs or 0 for i in wanted],
        )
        result: list[TokenLogprobs | None] = [None] * len(batch.rows)
        for i, entry in zip(wanted, described, strict=True):
            result[i] = entry
        return result


def _take(rows: Tensor, indices: Sequence[int]) -> Tensor:
    return rows if len(indices) == len(rows) else rows.index_select(0, _index(indices, rows.device))


def _index(indices: Sequence[int], device: torch.device) -> Tensor:
    """As a tensor: indexing with a list would make the host wait for the device."""
    return upload(torch.tensor(indices, dtype=torch.int64), device)
