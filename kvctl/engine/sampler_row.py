"""One request's view of sampling: its parameters made ready, its token counts, its place in the random stream.

Knows nothing of the batch: whatever a row does to its logits depends on the request alone. The row reads the
runner's own list of token ids (prompt, then output, growing), so that nothing has to be told twice; counts for
penalties catch up with that list incrementally, O(new tokens) per step. Floor 2.

Order of what happens to the logits (vLLM's): allowed_token_ids, bad_words, min_tokens, logit_bias, then penalties;
temperature, min_p, top_k, top_p follow in `sampler.py`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.device import upload

_NEVER = float("-inf")


class SamplingRow:
    """What the sampler keeps of one running request. The runner makes it at admission and drops it at the end.

    `token_ids` is the runner's live list: prompt and output so far. `key` is the 64-bit seed of the request's random
    stream. Token ids outside the vocabulary are for the API process to refuse; here they are passed over, so that no
    request can stop the engine.
    """

    __slots__ = (
        "_allowed",
        "_banned_early",
        "_bias_ids",
        "_bias_values",
        "_counts",
        "_device",
        "_num_seen",
        "_num_synced",
        "_seen_counts",
        "_seen_ids",
        "_sequences",
        "_slot_of_token",
        "_vocab_size",
        "is_greedy",
        "is_plain_greedy",
        "is_processed",
        "key",
        "num_logprobs",
        "num_prompt_tokens",
        "params",
        "token_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        token_ids: list[int],
        num_prompt_tokens: int,
        eos_token_ids: Iterable[int],
        *,
        key: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.params = params
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.key = key
        self.num_logprobs = params.logprobs
        self._vocab_size = vocab_size
        self._device = device
        self._allowed = self._ids(params.allowed_token_ids) if params.allowed_token_ids else None
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._banned_early = self._ids(sorted(stop_ids)) if params.min_tokens > 0 else None
        bias = sorted((i, b) for i, b in params.logit_bias.items() if 0 <= i < vocab_size)
        self._bias_ids = self._ids([i for i, _ in bias]) if bias else None
        self._bias_values = upload(torch.tensor([b for _, b in bias], dtype=torch.float32), device) if bias else None
        self._sequences = [word for word in params.bad_words_token_ids if word and 0 <= word[-1] < vocab_size]
        self._counts = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        self._slot_of_token: dict[int, int] = {}
        self._num_seen = 0  # distinct tokens in the two tensors below
        self._num_synced = 0  # tokens of token_ids counted so far
        self._seen_ids = torch.empty(0, dtype=torch.int64)
        self._seen_counts = torch.empty(0)  # of the output only
        self.is_greedy = params.is_greedy
        self.is_processed = bool(
            self._allowed is not None
            or self._banned_early is not None
            or self._bias_ids is not None
            or self._sequences
            or self._counts
        )
        self.is_plain_greedy = self.is_greedy and not self.is_processed

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far: the index of the token to be sampled now."""
        return len(self.token_ids) - self.num_prompt_tokens

    def process(self, logits: Tensor) -> None:
        """Apply everything but temperature and filters to logits float32 [V], in place."""
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill_(_NEVER)
            logits[self._allowed] = kept
        if self._sequences:
            banned = [word[-1] for word in self._sequences if self._ends_with(word[:-1])]
            if banned:
                logits[upload(torch.tensor(banned), self._device)] = _NEVER
        if self._banned_early is not None and self.num_output_tokens < self.params.min_tokens:
            logits[self._banned_early] = _NEVER
        if self._bias_ids is not None and self._bias_values is not None:
            logits[self._bias_ids] += self._bias_values
        if self._counts:
            self._penalise(logits)
        if self._allowed is not None:
            self._keep_one_allowed(logits)

    def _keep_one_allowed(self, logits: Tensor) -> None:
        """Where all that is allowed is banned too, the first of it stays: a token must come, and no other may."""
        assert self._allowed is not None  # the caller has looked
        first = self._allowed[:1]
        has_any = (logits[self._allowed] > _NEVER).any()
        logits[first] = torch.where(has_any, logits[first], 0.0)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        kept = [i for i in ids if 0 <= i < self._vocab_size]
        return upload(torch.tensor(kept, dtype=torch.int64), self._device)

    def _ends_with(self, start: tuple[int, ...]) -> bool:
        return not start or (
            len(start) <= len(self.token_ids) and tuple(self.token_ids[len(self.token_ids) - len(start) :]) == start
        )

    def _penalise(self, logits: Tensor) -> None:
        self._catch_up()
        seen = self._seen_ids[: self._num_seen]
        counts = self._seen_counts[: self._num_seen]
        if seen.device != logits.device:
            seen, counts = upload(seen, logits.device), upload(counts, logits.device)
        values = logits[seen]
        penalty = self.params.repetition_penalty
        if penalty != 1.0:
            values = torch.where(values > 0, values / penalty, values * penalty)
        values -= self.params.frequency_penalty * counts
        values -= self.params.presence_penalty * (counts > 0)
        logits[seen] = values

    def _catch_up(self) -> None:
        """Count the tokens that came since the last step; O(those tokens)."""
        total = len(self.token_ids)
        if self._num_synced == total:
            return
        counts_prompt = self.params.repetition_penalty != 1.0
        first = self._num_synced if counts_prompt else max(self._num_synced, self.num_prompt_tokens)
        needed = self._num_seen + total - first
        if needed > len(self._seen_ids):
            ids = torch.empty(max(64, 2 * needed), dtype=torch.int64)
            counts = torch.zeros(len(ids))
            ids[: self._num_seen] = self._seen_ids[: self._num_seen]
            counts[: self._num_seen] = self._seen_counts[: self._num_seen]
            self._seen_ids, self._seen_counts = ids, counts
        id_array, count_array = self._seen_ids.numpy(), self._seen_counts.numpy()
        for index in range(first, total):
            token = self.token_ids[index]
            if not 0 <= token < self._vocab_size:
                continue
            slot = self._slot_of_token.setdefault(token, self._num_seen)
            if slot == self._num_seen:
                id_array[slot] = token
                count_array[slot] = 0
                self._num_seen += 1
            if index >= self.num_prompt_tokens:
                count_array[slot] += 1
        self._num_synced = total
