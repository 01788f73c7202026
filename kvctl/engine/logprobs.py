"""Log probabilities as the API reports them: of the chosen token, its rank, and the most likely others.

Knows logits and token ids only. Raw: of the model's own distribution, before temperature, penalties and filters.
Floor 2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvctl.core.step import TokenLogprobs
from kvctl.engine.device import download, upload

_ROWS_AT_ONCE = 64  # bounds the float32 copy: 64 x vocabulary


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_logprobs: Sequence[int]) -> list[TokenLogprobs]:
    """Describe `token_ids[i]` under logits[i]: logits [T, V] of any dtype, num_logprobs[i] others, -1 for all.

    Rank 1 is the most likely token; tokens as likely as the chosen one do not lower its rank. On a GPU the host waits
    once for all of them.
    """
    chosen = upload(torch.tensor(list(token_ids), dtype=torch.int64), logits.device)
    found = download(measure_logprobs(logits, chosen, num_logprobs))
    return collect_logprobs(found, token_ids, num_logprobs, logits.shape[1])


def measure_logprobs(logits: Tensor, chosen: Tensor, num_logprobs: Sequence[int]) -> list[Tensor]:
    """The device's part of `token_logprobs`, without a wait: for each _ROWS_AT_ONCE rows the chosen tokens'
    log probabilities and ranks, and values and ids of the most likely tokens.
    """
    found: list[Tensor] = []
    for first in range(0, len(num_logprobs), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        logprobs = torch.log_softmax(logits[part].float(), dim=-1)
        own = logprobs.gather(1, chosen[part].unsqueeze(1))
        best = logprobs.topk(max(_counts(num_logprobs[part], logits.shape[1])), dim=-1)
        found += [own.squeeze(1), (logprobs > own).sum(dim=-1) + 1, best.values, best.indices]
    return found


def collect_logprobs(
    found: Sequence[Tensor], token_ids: Sequence[int], num_logprobs: Sequence[int], vocab_size: int
) -> list[TokenLogprobs]:
    """The host's part: what `measure_logprobs` found, on the CPU, as one object per token."""
    values, ranks = _concatenated(found[0::4]), _concatenated(found[1::4])
    best_values, best_ids = _concatenated(found[2::4]), _concatenated(found[3::4])
    return [
        TokenLogprobs([token, *ids[:count]], [value, *others[:count]], rank)
        for token, count, value, rank, others, ids in zip(
            token_ids, _counts(num_logprobs, vocab_size), values, ranks, best_values, best_ids, strict=True
        )
    ]


def _counts(num_logprobs: Sequence[int], vocab_size: int) -> list[int]:
    return [vocab_size if count < 0 else min(count, vocab_size) for count in num_logprobs]


def _concatenated(parts: Sequence[Tensor]) -> list[Any]:
    return [entry for part in parts for entry in part.tolist()]
