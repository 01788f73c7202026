"""From a request's fields to `SamplingParams`: user's value, then the model's generation config, then vLLM's default.

Knows no HTTP and no engine. Whatever would change the answer and cannot be honoured is refused here. Floor 3.
"""

from typing import Final

from kvctl.core.sampling_params import SamplingParams
from kvctl.errors import FeatureNotServed, InvalidRequest
from kvctl.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from kvctl.server.sampling_defaults import SamplingDefaults, SamplingLimits

DEFAULT_COMPLETION_TOKENS: Final = 16

_REFUSED: Final = {
    "use_beam_search": "beam search",
    "structured_outputs": "constrained decoding",
    "guided_json": "constrained decoding",
    "guided_regex": "constrained decoding",
    "guided_choice": "constrained decoding",
    "guided_grammar": "constrained decoding",
    "logprob_token_ids": "logprobs of chosen token ids",
    "repetition_detection": "repetition detection",
    "thinking_token_budget": "a budget for thinking tokens",
    "suffix": "filling in the middle",
    "prompt_embeds": "a prompt of embeddings",
    "audio": "audio output",
    "functions": "functions (now called tools)",
    "function_call": "function calls (now called tools)",
}


def refuse_unsupported(request: GenerationRequest) -> None:
    """Say no to what would change the answer but is not served.

    Raises:
        FeatureNotServed: such a field is set.
    """
    for field, what in _REFUSED.items():
        value = getattr(request, field, None)
        if value not in (None, False, [], {}, ""):
            raise FeatureNotServed(f"{field} is set, but {what} is not served here", hint="Leave it out.", param=field)
    response_format = request.response_format
    if response_format is not None:
        kind = response_format.get("type") if isinstance(response_format, dict) else response_format
        if kind != "text":
            raise FeatureNotServed(
                f"response_format of type {str(kind)[:80]!r} is not served here, only 'text' is",
                hint="Leave it out and describe the format in the prompt.",
                param="response_format",
            )
    if isinstance(request, CompletionRequest) and request.best_of is not None and request.best_of > (request.n or 1):
        raise FeatureNotServed(
            f"best_of is {request.best_of}, but choosing among more than n is not served here",
            hint="Leave it out, or ask for n choices and choose.",
            param="best_of",
        )
    if isinstance(request, ChatCompletionRequest):
        _refuse_tool_calls(request)
        if request.modalities not in (None, [], ["text"]):
            raise FeatureNotServed("only the modality 'text' is served here", param="modalities")


def _refuse_tool_calls(request: ChatCompletionRequest) -> None:
    choice = request.tool_choice
    if request.tools is not None and not request.tools:
        raise InvalidRequest("tools must not be an empty list", hint="Leave it out.", param="tools")
    if isinstance(choice, dict) or choice == "required":
        raise FeatureNotServed(
            "a forced tool call is not served here", hint="Use tool_choice 'none'.", param="tool_choice"
        )
    if choice is not None and choice not in ("none", "auto"):
        raise InvalidRequest(f"tool_choice {choice[:80]!r} is unknown", param="tool_choice")
    if request.tools and choice != "none":
        raise FeatureNotServed(
            "tool calls in the answer are not parsed here",
            hint="With tool_choice 'none' the tools are shown to the model and its answer comes as text.",
            param="tools",
        )


def wants_logprobs(request: GenerationRequest) -> int | None:
    """How many most likely tokens a request wants per generated token; None for no logprobs at all.

    Raises:
        InvalidRequest: top_logprobs without logprobs.
    """
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatCompletionRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs is set, logprobs is not true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def check_logprobs(name: str, count: int | None, limits: SamplingLimits) -> None:
    """Refuse more logprobs per token than the operator allows.

    Raises:
        InvalidRequest: over `--max-logprobs`, or under -1.
    """
    if count is None:
        return
    if count < -1:
        raise InvalidRequest(f"{name} must be -1 (all), 0 or more, got {count}", param=name)
    wanted = limits.vocab_size if count == -1 else count
    if wanted > limits.vocab_size:
        raise InvalidRequest(f"{name} is {wanted}, the vocabulary has {limits.vocab_size} tokens", param=name)
    if limits.max_logprobs != -1 and wanted > limits.max_logprobs:
        raise InvalidRequest(
            f"{name} is {count}, at most {limits.max_logprobs} are allowed",
            hint="The server's --max-logprobs sets the limit.",
            param=name,
        )


def requested_max_tokens(request: GenerationRequest, limits: SamplingLimits) -> int | None:
    """The output length the request asks for; None: as much as fits.

    0 is only allowed with `echo` on completions, and means the prompt alone.

    Raises:
        InvalidRequest: 0 without echo, or more than the model's length.
    """
    name, wanted = "max_tokens", request.max_tokens
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        name, wanted = "max_completion_tokens", request.max_completion_tokens
    if wanted is None:
        return DEFAULT_COMPLETION_TOKENS if isinstance(request, CompletionRequest) else None
    echo_only = isinstance(request, CompletionRequest) and bool(request.echo)
    if wanted < 1 and not echo_only:
        raise InvalidRequest(f"{name} must be at least 1, got {wanted}", param=name)
    if wanted > limits.max_model_len:
        raise InvalidRequest(
            f"{name} is {wanted}, the model's length is {limits.max_model_len} tokens for prompt and output together",
            param=name,
        )
    return wanted


def logit_bias(request: GenerationRequest, vocab_size: int) -> dict[int, float]:
    """Token ids as numbers.

    Raises:
        InvalidRequest: a key that is no token id of the vocabulary.
    """
    biases: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias has the key {key[:40]!r}, which is no token id under {vocab_size}", param="logit_bias"
            )
        biases[int(key)] = value
    return biases


def output_limit(
    request: GenerationRequest, *, num_prompt_tokens: int, defaults: SamplingDefaults, limits: SamplingLimits
) -> int:
    """Most output tokens for a prompt: what was asked for, silently limited to what the model's length leaves.

    Raises:
        InvalidRequest: as `requested_max_tokens`.
    """
    wanted = requested_max_tokens(request, limits)
    room = [limits.max_model_len - num_prompt_tokens]
    room += [count for count in (wanted, defaults.max_new_tokens) if count is not None]
    return max(1, min(room))


def build_sampling_params(
    request: GenerationRequest, *, max_tokens: int, defaults: SamplingDefaults, limits: SamplingLimits
) -> SamplingParams:
    """Build the sampling of the prompts whose `output_limit` is `max_tokens`.

    Raises:
        InvalidRequest: a value outside its range; `param` names it.
    """
    top = wants_logprobs(request)
    is_completion = isinstance(request, CompletionRequest)
    check_logprobs("logprobs" if is_completion else "top_logprobs", top, limits)
    check_logprobs("prompt_logprobs", request.prompt_logprobs, limits)
    prompt_top = request.prompt_logprobs
    if prompt_top is not None and request.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", hint="Leave stream out.", param="prompt_logprobs")
    if prompt_top is None and isinstance(request, CompletionRequest) and request.echo:
        prompt_top = request.logprobs
    num_allowed = len(request.allowed_token_ids or ())
    if num_allowed > limits.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids has {num_allowed} ids, the vocabulary has {limits.vocab_size}",
            param="allowed_token_ids",
        )
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token_id in getattr(request, name) or ():
            if token_id >= limits.vocab_size:
                raise InvalidRequest(
                    f"{name} has {token_id}, the vocabulary has {limits.vocab_size} tokens", param=name
                )
    if request.allowed_token_ids is not None and not request.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids must not be empty", hint="Leave it out.", param="allowed_token_ids")
    given = {
        "n": request.n,
        "min_tokens": request.min_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "seed": request.seed,
        "ignore_eos": request.ignore_eos,
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": request.skip_special_tokens,
    }
    stop = () if request.stop is None else request.stop
    fields = defaults.as_params() | {key: value for key, value in given.items() if value is not None}
    return SamplingParams(
        **fields,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        bad_words=tuple(request.bad_words or ()),
        logit_bias=logit_bias(request, limits.vocab_size),
        logprobs=top,
        prompt_logprobs=prompt_top,
    )
