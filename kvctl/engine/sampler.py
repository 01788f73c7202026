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
from kvctl.engine.device import download, upload
from kvctl.engine.logprobs import collect_logprobs, measure_logprobs
from kvctl.engine.ops import triton_problem
from kvctl.engine.sampler_random import filtered_race, first_look, keys_tensor, mix64, race, token_key
from kvctl.engine.sampler_row import SamplingRow
from kvctl_kernels.cpu_build import NativeUnavailable, load_native
from kvctl_kernels.cpu_sampling import NativeSampling

__all__ = ["Sampler", "SamplerOutput", "SamplingBatch", "SamplingKernels", "SamplingRow", "select_sampling"]


class SamplingKernels(Protocol):
    """The two operations that look at every token of the vocabulary."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Index of the largest logit of each row [R, V], the first of equal ones: int64 [R]."""

    def draw(self, scaled: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Draw a token per row, as `sampler_random.filtered_race` describes. The last three are on the CPU.

        A token of -1 is still open: `filtered_race` is to be asked for it.
        """


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
        if not len(limited):
            return self._race(scaled, keys)
        top_k, top_p, min_p = (upload(x[limited], scaled.device) for x in (top_k, top_p, min_p))
        if not len(free):
            return first_look(scaled, keys, top_k, top_p, min_p)
        limited, free = upload(limited, scaled.device), upload(free, scaled.device)
        tokens = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
        tokens[free] = self._race(scaled[free], keys[free])
        tokens[limited] = first_look(scaled[limited], keys[limited], top_k, top_p, min_p)
        return tokens


def select_sampling(
    device: torch.device | str, cpu_kernels: CpuKernels = "auto", num_threads: int | None = None
) -> SamplingKernels:
    """Choose as `select_ops` does; where the native kernels cannot be had, `select_ops` has told why already."""
    if torch.device(device).type == "cuda":
        return _cuda_sampling(torch.device(device))
    if torch.device(device).type != "cpu" or cpu_kernels == "torch":
        return TorchSampling()
    try:
        return NativeSampling(load_native(), num_threads or torch.get_num_threads())
    except NativeUnavailable:
        return TorchSampling()


def _cuda_sampling(device: torch.device) -> SamplingKernels:
    if triton_problem(device):
        return TorchSampling()
    from kvctl_kernels import triton_sampling

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
        "num_logprobs",
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
        self.num_logprobs = [rows[i].num_logprobs or 0 for i in self.with_logprobs]
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
        """Choose a token per row: logits [R, V], float32 or the model's dtype; they are not changed.

        On a GPU the host waits once, for the tokens and their logprobs together (again only for what `draw` left open).
        """
        drawn = None if batch.is_plain_greedy else self._drawn_logits(logits, batch)
        tokens = self._kernels.argmax(logits) if drawn is None else self._choose(logits, drawn, batch)
        measured = self._measure(logits, batch, tokens)
        host_tokens, *host_measured = download([tokens, *measured])
        token_ids: list[int] = host_tokens.tolist()
        if drawn is not None and min(token_ids) < 0:
            self._settle(drawn, batch, token_ids)
            tokens = upload(torch.tensor(token_ids), logits.device)
            host_measured = download(self._measure(logits, batch, tokens))
        if not batch.with_logprobs:
            return SamplerOutput(token_ids)
        described = collect_logprobs(
            host_measured, [token_ids[i] for i in batch.with_logprobs], batch.num_logprobs, logits.shape[1]
        )
        result: list[TokenLogprobs | None] = [None] * len(batch.rows)
        for i, entry in zip(batch.with_logprobs, described, strict=True):
            result[i] = entry
        return SamplerOutput(token_ids, result)

    def _drawn_logits(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """The worked rows after biases, bans, penalties and temperature: float32 [worked, V]."""
        scaled = _take(logits, batch.worked).to(torch.float32, copy=True)
        for i in batch.processed:
            batch.rows[batch.worked[i]].process(scaled[i])
        scaled /= upload(batch.temperatures, scaled.device).unsqueeze(1)
        return scaled

    def _choose(self, logits: Tensor, scaled: Tensor, batch: SamplingBatch) -> Tensor:
        """A token per row of the batch, int64 [R] where the logits are; -1: not settled yet."""
        tokens = torch.empty(len(batch.worked), dtype=torch.int64, device=scaled.device)
        if batch.greedy:
            tokens[_index(batch.greedy, tokens.device)] = self._kernels.argmax(_take(scaled, batch.greedy))
        if batch.random:
            tokens[_index(batch.random, tokens.device)] = self._kernels.draw(
                _take(scaled, batch.random), self._keys(batch, batch.random), batch.top_k, batch.top_p, batch.min_p
            )
        if len(batch.worked) == len(batch.rows):
            return tokens
        chosen = self._kernels.argmax(logits)
        chosen[_index(batch.worked, chosen.device)] = tokens
        return chosen

    def _settle(self, scaled: Tensor, batch: SamplingBatch, token_ids: list[int]) -> None:
        """Draw what the first look left open; rare: a flat distribution, or equal logits at the edge of a filter."""
        places = [place for place, i in enumerate(batch.random) if token_ids[batch.worked[i]] < 0]
        rows, on = [batch.random[place] for place in places], scaled.device
        filters = (upload(x[places], on) for x in (batch.top_k, batch.top_p, batch.min_p))
        tokens = filtered_race(_take(scaled, rows), self._keys(batch, rows), *filters)
        for i, token in zip(rows, tokens.tolist(), strict=True):
            token_ids[batch.worked[i]] = token

    def _keys(self, batch: SamplingBatch, indices: Sequence[int]) -> Tensor:
        rows = [batch.rows[batch.worked[i]] for i in indices]
        return keys_tensor([token_key(row.key, row.num_output_tokens) for row in rows], self._device)

    def _measure(self, logits: Tensor, batch: SamplingBatch, tokens: Tensor) -> list[Tensor]:
        wanted = batch.with_logprobs
        if not wanted:
            return []
        # A token that is not settled yet (-1) is measured again; until then it stands for token 0.
        rows, chosen = _take(logits, wanted), _take(tokens.clamp_min(0), wanted)
        return measure_logprobs(rows, chosen, batch.num_logprobs)


def _take(rows: Tensor, indices: Sequence[int]) -> Tensor:
    return rows if len(indices) == len(rows) else rows.index_select(0, _index(indices, rows.device))


def _index(indices: Sequence[int], device: torch.device) -> Tensor:
    """As a tensor: indexing with a list would make the host wait for the device."""
    return upload(torch.tensor(indices, dtype=torch.int64), device)
