"""Log probabilities as the API reports them: of the chosen token, its rank, and the most likely others.

Knows logits and token ids only. Raw: of the model's own distribution, before temperature, penalties and filters.
Floor 2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvctl.core.step import TokenLogprobs

_ROWS_AT_ONCE = 64  # bounds the float32 copy: 64 x vocabulary


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_logprobs: Sequence[int]) -> list[TokenLogprobs]:
    """Describe `token_ids[i]` under logits[i]: logits [T, V] of any dtype, num_logprobs[i] others, -1 for all.

    Rank 1 is the most likely token; tokens as likely as the chosen one do not lower its rank.
    """
    vocab_size = logits.shape[1]
    counts = [vocab_size if count < 0 else min(count, vocab_size) for count in num_logprobs]
    result: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, len(token_ids))
        logprobs = torch.log_softmax(logits[first:last].float(), dim=-1)
        chosen_ids = torch.tensor(list(token_ids[first:last]), dtype=torch.int64, device=logits.device).unsqueeze(1)
        chosen = logprobs.gather(1, chosen_ids)
        ranks = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
        chosen_values = chosen.squeeze(1).tolist()
        widest = max(counts[first:last])
        if widest:
            best = logprobs.topk(widest, dim=-1)
            best_values, best_ids = best.values.tolist(), best.indices.tolist()
        for row in range(last - first):
            count = counts[first + row]
            others = (best_ids[row][:count], best_values[row][:count]) if count else ([], [])
            result.append(
                TokenLogprobs(
                    token_ids=[token_ids[first + row], *others[0]],
                    logprobs=[chosen_values[row], *others[1]],
                    rank=ranks[row],
                )
            )
    return result
