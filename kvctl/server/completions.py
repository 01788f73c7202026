"""POST /v1/completions: text or token ids in, text out. Floor 3."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from kvctl.core.request import FinishReason
from kvctl.engine.request_output import RequestOutput
from kvctl.errors import FeatureNotServed
from kvctl.server.chunks import CompletionChunks, PromptText, ResponseMeta
from kvctl.server.collect import CollectedChoice, CollectedPrompt
from kvctl.server.context import ServingContext
from kvctl.server.exchange import OutputStream
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
from kvctl.server.prompts import check_fits, encode, truncate
from kvctl.server.protocol import CompletionRequest
from kvctl.server.sampling import requested_max_tokens


def split_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One entry per prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):  # then all of them are
        return [prompt]
    return cast(list[str | list[int]], prompt)


async def read_prompts(context: ServingContext, body: CompletionRequest) -> list[PromptText]:
    """Tokenize, cut and check every prompt.

    Raises:
        InvalidRequest: one does not fit or holds unknown ids.
    """
    max_model_len, vocab_size = context.limits.max_model_len, context.limits.vocab_size
    max_tokens = requested_max_tokens(body, context.limits) or 0
    add_special_tokens = body.add_special_tokens is not False
    prompts: list[PromptText] = []
    for number, prompt in enumerate(split_prompts(body.prompt)):
        if number % 16 == 15:
            await asyncio.sleep(0)  # let others' tokens pass
        if isinstance(prompt, str):
            token_ids = await encode(
                context.tokenizer, prompt, add_special_tokens=add_special_tokens, max_model_len=max_model_len
            )
        else:
            token_ids = prompt
        kept = truncate(token_ids, body, max_model_len=max_model_len, max_tokens=max_tokens)
        check_fits(kept, max_model_len=max_model_len, vocab_size=vocab_size)
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) and kept == token_ids else context.tokenizer.decode(kept)
        prompts.append(PromptText(kept, echo))
    return prompts


async def without_output(stream: OutputStream) -> AsyncGenerator[RequestOutput, None]:
    """The stream of an echo with max_tokens 0: the prompt and its logprobs, no generated token."""
    async with aclosing(stream):
        async for output in stream:
            yield replace(
                output,
                text_delta="",
                token_ids_delta=[],
                logprobs_delta=[],
                stop_reason=None,
                finish_reason=FinishReason.LENGTH
                if output.finish_reason is FinishReason.STOP
                else output.finish_reason,
            )


async def create_completion(context: ServingContext, http: Request, body: CompletionRequest) -> Response:
    """Serve one completions request."""
    meta = begin(context, body, http, "cmpl")
    if body.echo and body.stream and body.logprobs is not None and meta.n > 1:
        raise FeatureNotServed("echo with logprobs of several choices cannot be streamed", param="echo")
    prompts = await read_prompts(context, body)
    options = chunk_options(context, body)
    streams = await start_streams(context, body, meta, prompts)
    if body.max_tokens == 0:
        streams = [without_output(stream) for stream in streams]
    if body.stream:
        return stream_response(context, streams, CompletionChunks(meta, prompts, options, context.texts))
    collected = await collect_response(context, http, meta, streams)
    num_values = sum(result.num_logprobs for result in collected)
    return await json_answer(lambda: completion_object(context, body, meta, prompts, collected), num_values)


def completion_object(
    context: ServingContext,
    body: CompletionRequest,
    meta: ResponseMeta,
    prompts: Sequence[PromptText],
    collected: Sequence[CollectedPrompt],
) -> dict[str, Any]:
    """Build the text_completion object."""
    choices = [
        {"index": prompt_index * meta.n + index, **_choice_object(context, body, prompt, result, choice)}
        for prompt_index, (prompt, result) in enumerate(zip(prompts, collected, strict=True))
        for index, choice in enumerate(result.choices)
    ]
    return {
        "id": meta.response_id,
        "object": "text_completion",
        "created": meta.created_s,
        "model": meta.model,
        "choices": choices,
        "usage": total_usage(prompts, collected),
    }


def _choice_object(
    context: ServingContext,
    body: CompletionRequest,
    prompt: PromptText,
    result: CollectedPrompt,
    choice: CollectedChoice,
) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None:
        formatter = LogprobFormatter(context.texts, num_top=body.logprobs, as_ids=tokens_as_ids(context, body))
        if body.echo and result.prompt_logprobs is not None:
            logprobs = formatter.completion(
                prompt.token_ids + choice.token_ids, [*result.prompt_logprobs, *choice.logprobs]
            )
        else:
            logprobs = formatter.completion(choice.token_ids, choice.logprobs)
    fields: dict[str, Any] = {
        "text": (prompt.echo or "") + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason.value if choice.finish_reason else None,
        "stop_reason": choice.stop_reason,
    }
    if body.prompt_logprobs is not None and result.prompt_logprobs is not None:
        fields["prompt_logprobs"] = shape_prompt_logprobs(result.prompt_logprobs, context.texts)
    if body.return_token_ids:
        fields |= {"prompt_token_ids": prompt.token_ids, "token_ids": choice.token_ids}
    return fields
