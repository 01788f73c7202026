"""What completions and chat completions do alike: parameters for each prompt, streams, the answer's frame.

Knows no endpoint's shape. Everything is validated before the first stream starts, so that a request is either
refused as a whole or served as a whole. Floor 3.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvctl.core.sampling_params import SamplingParams
from kvctl.errors import InvalidRequest
from kvctl.server.chunks import ChunkBuilder, ChunkOptions, PromptText, ResponseMeta, usage_object
from kvctl.server.collect import CollectedPrompt, collect
from kvctl.server.context import ServingContext
from kvctl.server.errors import ShuttingDown
from kvctl.server.exchange import OutputStream, close_all, run_for_client
from kvctl.server.protocol import GenerationRequest
from kvctl.server.sampling import build_sampling_params, refuse_unsupported, wants_logprobs
from kvctl.server.streaming import EventStream

MAX_CHOICES = 16_384  # of one request, over all its prompts
logger = logging.getLogger(__name__)


def begin(context: ServingContext, body: GenerationRequest, http: Request, prefix: str) -> ResponseMeta:
    """Check what needs no prompt and name the response.

    Raises:
        ShuttingDown: no new work is taken.
        ModelNotFound, FeatureNotServed, InvalidRequest: the request cannot be served.
    """
    if context.is_draining:
        raise ShuttingDown("the server is shutting down", hint="Send the request to another server.")
    model = context.model.check(body.model)
    refuse_unsupported(body)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is set, stream is not true", param="stream_options")
    base = http.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex
    return ResponseMeta(f"{prefix}-{base[:256]}", int(time.time()), model, body.n or 1)


def chunk_options(context: ServingContext, body: GenerationRequest) -> ChunkOptions:
    """Read what each chunk shall hold."""
    stream = body.stream_options
    return ChunkOptions(
        include_usage=context.options.force_include_usage or bool(stream and stream.include_usage),
        continuous_usage=bool(stream and stream.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        num_logprobs=wants_logprobs(body),
        tokens_as_ids=tokens_as_ids(context, body),
    )


def tokens_as_ids(context: ServingContext, body: GenerationRequest) -> bool:
    """Whether logprobs name tokens 'token_id:123'."""
    if body.return_tokens_as_token_ids is None:
        return context.options.return_tokens_as_token_ids
    return body.return_tokens_as_token_ids


async def start_streams(
    context: ServingContext, body: GenerationRequest, meta: ResponseMeta, prompts: Sequence[PromptText]
) -> list[OutputStream]:
    """Validate all prompts, then hand them to the engine.

    Raises:
        InvalidRequest: whatever is wrong with one of them; nothing was started then.
        EngineDead: there is no engine any more.
    """
    if meta.n * len(prompts) > MAX_CHOICES:
        raise InvalidRequest(f"n times the prompts is {meta.n * len(prompts)}, over {MAX_CHOICES}", param="n")
    params: list[SamplingParams] = [
        build_sampling_params(
            body, num_prompt_tokens=len(prompt.token_ids), defaults=context.defaults, limits=context.limits
        )
        for prompt in prompts
    ]
    streams: list[OutputStream] = []
    try:
        for prompt, sampling in zip(prompts, params, strict=True):
            request_id = f"{meta.response_id}-{next(context.request_numbers)}"
            if context.options.log_requests:
                logger.info("request %r: %d prompt tokens, %s", request_id, len(prompt.token_ids), sampling)
            streams.append(
                context.engine.generate(
                    prompt.token_ids,
                    sampling,
                    request_id=request_id,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt,
                )
            )
    except BaseException:
        await close_all(streams)
        raise
    return streams


def stream_response(context: ServingContext, streams: Sequence[OutputStream], chunks: ChunkBuilder) -> Response:
    """Answer as server-sent events."""
    return EventStream(streams, chunks, context.closing)


async def collect_response(
    context: ServingContext, http: Request, meta: ResponseMeta, streams: Sequence[OutputStream]
) -> list[CollectedPrompt]:
    """Wait for the whole answer, as long as the client does.

    Raises:
        ClientDisconnected, ShuttingDown: nobody waits, or the server ends.
        KvctlError: the engine failed on it.
    """
    try:
        return await run_for_client(collect(streams, meta.n), http.receive, context.closing)
    finally:
        await close_all(streams)


def total_usage(prompts: Sequence[PromptText], collected: Sequence[CollectedPrompt]) -> dict[str, Any]:
    """The usage over all prompts and choices."""
    return usage_object(
        sum(len(prompt.token_ids) for prompt in prompts),
        sum(len(choice.token_ids) for prompt in collected for choice in prompt.choices),
        sum(prompt.num_cached_tokens for prompt in collected),
    )
