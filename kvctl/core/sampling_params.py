"""How the next token of a request is chosen, validated on construction.

Knows no tokenizer: stop strings are matched by the API process, `bad_words` reach the engine as token ids.
Limits and their messages follow what clients of OpenAI-compatible servers expect (vLLM's). Floor 0.
"""

from dataclasses import dataclass, field

from kvctl.errors import InvalidRequest

MIN_TEMPERATURE = 0.01  # smaller ones overflow in half precision; 0 itself means greedy
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 16_384  # of all of them: half a match of a long one is searched while everybody's streams wait


def _finite(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high  # NaN is inside nothing
    if not inside:
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low:g}, {high:g}], got {value}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling. `temperature` 0 is greedy; `top_k` 0 (or -1) and `top_p` 1 are off.

    Raises:
        InvalidRequest: a value outside its range; `param` names it.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all are allowed
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # that many most likely tokens beside the chosen one; -1: the whole vocabulary
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidRequest(f"n must be at least 1, got {self.n}", param="n")
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}",
                param="min_tokens",
            )
        _finite("temperature", self.temperature, 0, 2)
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        _finite("top_p", self.top_p, 0, 1, open_low=True)
        _finite("min_p", self.min_p, 0, 1)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        elif self.top_k < 0:
            raise InvalidRequest(f"top_k must be -1, 0 (both: off) or more, got {self.top_k}", param="top_k")
        _finite("presence_penalty", self.presence_penalty, -2, 2)
        _finite("frequency_penalty", self.frequency_penalty, -2, 2)
        _finite("repetition_penalty", self.repetition_penalty, 0, 1e6, open_low=True)
        if self.n > 1 and self.temperature == 0:
            raise InvalidRequest(f"n must be 1 when using greedy sampling, got {self.n}", param="n")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidRequest(f"seed must be a 64-bit integer, got {self.seed}", param="seed")
        for token_id, bias in self.logit_bias.items():
            _finite(f"logit_bias[{token_id}]", bias, -100, 100)
        if any(not text for text in self.stop):
            raise InvalidRequest("stop must not hold an empty string", param="stop")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop holds {len(self.stop)} strings, {MAX_STOP_STRINGS} are allowed", param="stop")
        num_chars = sum(map(len, self.stop))
        if num_chars > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop holds {num_chars} characters, {MAX_STOP_CHARS} are allowed", param="stop")
        if any(not text for text in self.bad_words):
            raise InvalidRequest("bad_words must not hold an empty string", param="bad_words")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count < -1:
                raise InvalidRequest(f"{name} must be -1 (all), 0 or more, got {count}", param=name)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0
