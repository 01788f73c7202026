"""The bodies that clients send, as pydantic models: field names, types and the limits that need no model.

Knows no engine and no tokenizer. A field that is not listed here is ignored, as vLLM does; one of type `Refused`
would change the answer and is refused when set, never silently dropped. None means "not given": the model's
generation config and then vLLM's default decide. Ranges of sampling values are checked by `SamplingParams`, so that
offline and HTTP use say the same. Floor 3.

Types are strict ("16" is no number) except that 16.0 is taken for 16, which JSON cannot tell apart. Every list ends at
its first wrong element: a million of them are one error, not a million.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 1024  # in one completions request; vLLM's limit
MAX_STOP_TOKEN_IDS = 4096
MAX_MESSAGES = 8192  # also the parts of one, tools and documents


def _unsaid(schema: dict[str, Any]) -> None:
    """Keep a limit that only floods meet out of the document: generators of test data would fill it."""
    del schema["maxItems"]


LIMITED = Field(fail_fast=True, max_length=MAX_MESSAGES, json_schema_extra=_unsaid)


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _finite_biases(biases: dict[str, Any]) -> dict[str, Any]:
    """Check by hand what pydantic would complain about once per entry."""
    for key, bias in biases.items():
        if type(bias) not in (int, float) or not abs(bias) < math.inf:
            raise PydanticCustomError("bias", "the bias of {key} is not a finite number", {"key": key[:40]})
    return biases


Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], LIMITED]
Biases = Annotated[
    dict[str, Any],
    AfterValidator(_finite_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]


def _number(low: float, high: float) -> WithJsonSchema:
    """Document a range that `SamplingParams` checks."""
    return WithJsonSchema({"type": "number", "minimum": low, "maximum": high})


Refused = SkipJsonSchema[Any]  # known, not served: `sampling.refuse_unsupported` names it; not in the OpenAPI document


class Body(BaseModel):
    """A JSON object from a client: unknown fields are ignored, NaN and infinity refused."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Body):
    """The fields that completions and chat completions share."""

    model: str | None = Field(None, description="A served model name; the first one if left out.")
    n: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=16384)] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Strings | None = None
    seed: Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, _number(0, 2)] | None = None
    top_p: Annotated[float, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 1})] | None = None
    frequency_penalty: Annotated[float, _number(-2, 2)] | None = None
    presence_penalty: Annotated[float, _number(-2, 2)] | None = None
    logit_bias: Biases | None = Field(None, description="Token id (as text) to bias, -100 to 100.")
    user: str | None = None
    # beyond OpenAI: vLLM's names
    top_k: Annotated[int, BeforeValidator(_whole), WithJsonSchema({"type": "integer", "minimum": -1})] | None = None
    min_p: Annotated[float, _number(0, 1)] | None = None
    repetition_penalty: (
        Annotated[float, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 1e6})] | None
    ) = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Annotated[int, BeforeValidator(_whole), Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, BeforeValidator(_whole), Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    # known but not served
    use_beam_search: Refused = None
    response_format: Refused = None
    structured_outputs: Refused = None
    logprob_token_ids: Refused = None
    repetition_detection: Refused = None
    thinking_token_budget: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        str
        | Annotated[Strings, Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
        ],
        Field(union_mode="left_to_right", description="A text, texts, token ids, or lists of token ids."),
    ]
    echo: bool | None = None
    logprobs: Int | None = Field(None, description="That many most likely tokens per position; -1: all.")
    add_special_tokens: bool | None = None
    best_of: SkipJsonSchema[Int | None] = None  # more than n is known, not served
    suffix: Refused = None
    prompt_embeds: Refused = None


class ContentPart(BaseModel):
    """One part of a message; only type "text" is served."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Annotated[str, WithJsonSchema({"enum": ["text", "input_text"]})]
    text: str | None = None


class ChatMessage(BaseModel):
    """One message; fields beyond these reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[ContentPart], LIMITED] | None = None


class ChatFields(Body):
    """What turns messages into a prompt."""

    messages: Annotated[list[ChatMessage], LIMITED, Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    tools: Objects | None = None


class ChatCompletionRequest(GenerationRequest, ChatFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    echo: bool | None = None
    tool_choice: Annotated[str, WithJsonSchema({"enum": ["none", "auto"]})] | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: Refused = None
    audio: Refused = None
    functions: Refused = None
    function_call: Refused = None


class TokenizeCompletionRequest(Body):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """POST /tokenize with messages."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
