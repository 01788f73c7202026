"""POST /v1/chat/completions: messages in, one message per choice out. Floor 3."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvctl.server.chunks import ChatChunks, PromptText, ResponseMeta
from kvctl.server.collect import CollectedChoice, CollectedPrompt
from kvctl.server.context import ServingContext
from kvctl.server.generation import (
    begin,
    chunk_options,
    collect_response,
    start_streams,
    stream_response,
    tokens_as_ids,
    total_usage,
)
from kvctl.server.json_answer import json_answer
from kvctl.server.logprobs import LogprobFormatter, shape_prompt_logprobs
from kvctl.server.prompts import check_conversation, check_fits, encode, plain_messages, template_arguments, truncate
from kvctl.server.protocol import ChatCompletionRequest, ChatFields
from kvctl.server.sampling import requested_max_tokens, wants_logprobs


async def encode_chat(context: ServingContext, body: ChatFields) -> list[int]:
    """Render and tokenize a conversation.

    Raises:
        InvalidRequest: the template refuses it, or it is far too long.
    """
    max_model_len = context.limits.max_model_len
    check_conversation(body.messages, max_model_len=max_model_len)
    arguments = template_arguments(
        body,
        trust_template=context.options.trust_request_chat_template,
        default_kwargs=context.options.default_chat_template_kwargs,
    )
    if body.chat_template is None:
        text = context.tokenizer.apply_chat_template(**arguments)
    else:
        arguments["variables"] = context.tokenizer.special_tokens | arguments["variables"]
        text = await context.template_process.render(body.chat_template, arguments)
    return await encode(
        context.tokenizer,
        text,
        add_special_tokens=bool(body.add_special_tokens),
        max_model_len=max_model_len,
    )


def _role_and_echo(context: ServingContext, body: ChatCompletionRequest) -> tuple[str, str | None]:
    """The role of the answer, and the start of it that the client already has and wants repeated."""
    last = body.messages[-1]
    role = context.options.response_role if body.add_generation_prompt is not False else last.role
    if body.continue_final_message:
        role = last.role
    echo = plain_messages([last])[0]["content"] if body.echo and last.role == role else None
    return role, echo


async def create_chat_completion(context: ServingContext, http: Request, body: ChatCompletionRequest) -> Response:
    """Serve one chat completions request."""
    meta = begin(context, body, http, "chatcmpl")
    max_tokens = requested_max_tokens(body, context.limits) or 0
    max_model_len = context.limits.max_model_len
    token_ids = truncate(await encode_chat(context, body), body, max_model_len=max_model_len, max_tokens=max_tokens)
    check_fits(token_ids, max_model_len=max_model_len, vocab_size=context.limits.vocab_size)
    role, echo = _role_and_echo(context, body)
    prompt = PromptText(token_ids, echo)
    options = chunk_options(context, body)
    streams = await start_streams(context, body, meta, [prompt])
    if body.stream:
        return stream_response(context, streams, ChatChunks(meta, [prompt], options, context.texts, role=role))
    [collected] = await collect_response(context, http, meta, streams)
    return await json_answer(lambda: chat_object(context, body, meta, prompt, collected, role), collected.num_logprobs)


def chat_object(
    context: ServingContext,
    body: ChatCompletionRequest,
    meta: ResponseMeta,
    prompt: PromptText,
    collected: CollectedPrompt,
    role: str,
) -> dict[str, Any]:
    """Build the chat.completion object."""
    answer: dict[str, Any] = {
        "id": meta.response_id,
        "object": "chat.completion",
        "created": meta.created_s,
        "model": meta.model,
        "choices": [
            {"index": index, **_choice_object(context, body, prompt, choice, role)}
            for index, choice in enumerate(collected.choices)
        ],
        "usage": total_usage([prompt], [collected]),
    }
    if collected.prompt_logprobs is not None:
        answer["prompt_logprobs"] = shape_prompt_logprobs(collected.prompt_logprobs, context.texts)
    if body.return_token_ids:
        answer["prompt_token_ids"] = prompt.token_ids
    return answer


def _choice_object(
    context: ServingContext, body: ChatCompletionRequest, prompt: PromptText, choice: CollectedChoice, role: str
) -> dict[str, Any]:
    num_top = wants_logprobs(body)
    logprobs = None
    if num_top is not None:
        formatter = LogprobFormatter(context.texts, num_top=num_top, as_ids=tokens_as_ids(context, body))
        logprobs = formatter.chat(choice.logprobs)
    fields: dict[str, Any] = {
        "message": {"role": role, "content": (prompt.echo or "") + choice.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason.value if choice.finish_reason else None,
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        fields["token_ids"] = choice.token_ids
    return fields
