"""Random choice of a token from its logits: a counter-based stream, and the filters top_k, top_p, min_p.

Knows tensors and numbers, no requests. The noise of a token depends only on (the request's key, the index of the
output token, the token id): no generator state, so neither the batch nor an earlier step can change a draw.

A draw is an exponential race: with E_i ~ Exp(1) independent, argmax(logit_i - log E_i) has the distribution
softmax(logits). It needs no sum over the vocabulary, so rounding elsewhere in the row cannot tip it.
Source: Maddison, Tarlow, Minka, "A* Sampling" (2014), section 2 (the Gumbel-max trick). Floor 2.
"""

import torch
from torch import Tensor

from kvctl.engine.device import upload

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_ROWS_AT_ONCE = 8  # bounds the memory of the full-vocabulary race
FIRST_CANDIDATES = 64  # tokens looked at first for top_p and min_p; more only where these do not hold the mass


def mix64(state: int) -> int:
    """Scramble 64 bits. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def token_key(request_key: int, output_index: int) -> int:
    """The 64-bit key of one draw."""
    return mix64(mix64(request_key & _MASK64) ^ output_index)


def _mix32(x: Tensor) -> Tensor:
    """Scramble 32-bit values held in int64. Source of the constants: C. Wellons' hash prospector, "lowbias32"."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def race_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """-log E for each token: keys int64 [R, 2] (low and high half of `token_key`), token_ids int64 [R or 1, n].

    Returns float32 [R, n].
    """
    bits = _mix32(_mix32(token_ids ^ keys[:, :1]) ^ keys[:, 1:])
    uniform = bits.to(torch.float32) * 2.0**-32 + 2.0**-33
    # log1p resolves small E (the winners) to the last bit; a uniform that rounds to 1 gives E = inf: never wins.
    return -torch.log(-torch.log1p(-uniform))


def keys_tensor(keys: list[int], device: torch.device) -> Tensor:
    """64-bit keys as int64 [R, 2]: low half, high half."""
    return upload(torch.tensor([(key & _MASK32, key >> 32) for key in keys], dtype=torch.int64), device)


def race(scaled: Tensor, keys: Tensor) -> Tensor:
    """Draw from softmax(scaled) per row, int64 [R]: scaled float32 [R, V] (logits / temperature), keys int64 [R, 2]."""
    vocabulary = torch.arange(scaled.shape[1], device=scaled.device).unsqueeze(0)
    winners = []
    for first in range(0, len(scaled), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        winners.append((scaled[part] + race_noise(keys[part], vocabulary)).argmax(dim=-1))
    return torch.cat(winners)


def filtered_race(scaled: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Draw per row from what min_p, then top_k, then top_p leave of softmax(scaled).

    scaled float32 [R, V]; keys int64 [R, 2]; top_k int64 [R] (0: off), top_p and min_p float32 [R] (1, 0: off).
    Candidates are ordered by logit, equal ones by token id, so exactly k stay with top_k. Only as many tokens are
    sorted as hold the answer: FIRST_CANDIDATES, 16 times more where they do not suffice, at last all.
    Returns int64 [R]. On a GPU the host waits for each look.
    """
    result = first_look(scaled, keys, top_k, top_p, min_p)
    count = FIRST_CANDIDATES
    while len(pending := (result < 0).nonzero().squeeze(1)):
        count *= 16
        result[pending] = _look(scaled[pending], keys[pending], top_k[pending], top_p[pending], min_p[pending], count)
    return result


def first_look(scaled: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`filtered_race` from FIRST_CANDIDATES tokens alone; -1 where these do not settle it. The host never waits."""
    return _look(scaled, keys, top_k, top_p, min_p, FIRST_CANDIDATES)


def _look(scaled: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, count: int) -> Tensor:
    """Draw among the `count` likeliest tokens of each row, int64 [R]; -1: it cannot be known from these."""
    count = min(count, scaled.shape[1])
    ids = scaled.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    logits = scaled.gather(1, ids)
    probabilities = torch.softmax(scaled, dim=-1).gather(1, ids)
    kept, is_known = _kept(logits, probabilities, top_k, top_p, min_p, count == scaled.shape[1])
    score = (logits + race_noise(keys, ids)).masked_fill(~kept, float("-inf"))
    # A row without any finite logit (everything banned) falls to its first candidate instead of a banned index.
    winner = ids.gather(1, score.argmax(dim=-1, keepdim=True)).squeeze(1)
    return winner.masked_fill(~is_known, -1)


def _kept(
    logits: Tensor, probabilities: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, everything: bool
) -> tuple[Tensor, Tensor]:
    """Which of the sorted candidates [R, n] stay, bool [R, n], and for which rows that is certain, bool [R].

    Certain: the cut lies before the last candidate's value, whose equals may be missing here.
    """
    count = logits.shape[1]
    place = torch.arange(count, device=logits.device)
    limit = top_k.masked_fill(top_k <= 0, torch.iinfo(torch.int64).max).unsqueeze(1)
    kept = (place < limit) & (probabilities >= min_p.unsqueeze(1) * probabilities[:, :1])
    mass = (probabilities.double() * kept).cumsum(dim=-1)
    # Mass that top_p is a share of: what min_p and top_k left. Without them it is all, candidates or not.
    is_cut = torch.ones_like(kept[:, -1:]) if everything else ~kept[:, -1:]
    total = mass[:, -1:].masked_fill(~is_cut, 1.0)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    kept &= (before < top_p.unsqueeze(1) * total) | (top_p >= 1.0).unsqueeze(1)
    kept[:, 0] = True
    if everything:
        return kept, torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    beyond = kept & (logits == logits[:, -1:])
    total_is_known = is_cut.squeeze(1) | ((top_k == 0) & (min_p == 0.0))
    return kept, ~beyond.any(dim=-1) & (total_is_known | (top_p >= 1.0))
