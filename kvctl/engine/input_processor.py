"""Checks a request before it leaves for the engine, and cuts it into its children.

What can be known without the scheduler is refused here, so that a client gets its 400 at once. Knows no HTTP and
no streams. Floor 2, imports no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.config import EngineInfo
from kvctl.engine.tokenizer import Tokenizer
from kvctl.engine.wire import EngineRequest
from kvctl.errors import InvalidRequest

MAX_CHILDREN: Final = 16_384  # of n: vLLM's limit
_MAX_BAD_WORDS: Final = 1024
_MAX_BAD_WORD_CHARS: Final = 16_384  # in all: they are tokenized while everybody's streams wait, 2 us per character
_SEED_SPAN: Final = 1 << 63


class InputProcessor:
    """Knows the limits of one engine. One call of `process` per request."""

    def __init__(
        self, info: EngineInfo, tokenizer: Tokenizer, *, eos_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._max_model_len = info.max_model_len
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size

    def process(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[EngineRequest]:
        """Return the children to send: one, or `params.n` with ids "<request_id>_<i>" and seeds `seed + i`.

        `max_tokens` is lowered silently to what `max_model_len` leaves.

        Raises:
            InvalidRequest: empty or too long prompt, ids outside the vocabulary, too many children.
        """
        prompt = list(prompt_token_ids)
        self._check_prompt(prompt)
        if params.n > MAX_CHILDREN:
            raise InvalidRequest(f"n must be at most {MAX_CHILDREN}, got {params.n}", param="n")
        params = self._fit(params, len(prompt))
        ids = [request_id] if params.n == 1 else [f"{request_id}_{index}" for index in range(params.n)]
        return [
            EngineRequest(
                child_id,
                prompt,
                _child_params(params, index),
                arrival_s,
                priority,
                cache_salt,
                self._eos_token_ids,
            )
            for index, child_id in enumerate(ids)
        ]

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if len(prompt) >= self._max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, the model takes {self._max_model_len} with the output",
                hint="Shorten it, or start serve with a larger --max-model-len.",
                param="input_tokens",
            )
        self._check_ids("prompt", prompt)

    def _check_ids(self, param: str, token_ids: Iterable[int]) -> None:
        ids = tuple(token_ids)
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < self._vocab_size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is outside the vocabulary of {self._vocab_size}", param=param
            )

    def _fit(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        room = self._max_model_len - num_prompt_tokens
        bad_words = params.bad_words_token_ids
        if params.bad_words:
            bad_words = (*bad_words, *self._bad_words_token_ids(params.bad_words))
        for sequence in bad_words:
            self._check_ids("bad_words", sequence)
        if params.max_tokens <= room and bad_words is params.bad_words_token_ids:
            return params
        return replace(
            params,
            max_tokens=min(params.max_tokens, room),
            min_tokens=min(params.min_tokens, room),
            bad_words_token_ids=bad_words,
        )

    def _bad_words_token_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Each word as it stands at the start of a text and as it stands after a space."""
        if len(words) > _MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words holds {len(words)}, {_MAX_BAD_WORDS} are allowed", param="bad_words")
        num_chars = sum(map(len, words))
        if num_chars > _MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"bad_words holds {num_chars} characters, {_MAX_BAD_WORD_CHARS} are allowed", param="bad_words"
            )
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return list(found)


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index + _SEED_SPAN) % (2 * _SEED_SPAN) - _SEED_SPAN
    return replace(params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None)
