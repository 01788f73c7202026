"""What completions and chat completions do alike: parameters for each prompt, streams, the answer's frame.

Knows no endpoint's shape. Everything is validated before the first stream starts, so that a request is either
refused as a whole or served as a whole. Floor 3.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

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
from kvctl.server.sampling import build_sampling_params, output_limit, refuse_unsupported, wants_logprobs
from kvctl.server.streaming import EventStream

MAX_CHOICES: Final = 16_384  # of one request, over all its prompts
# What one request may send to the engine: each choice takes its prompt and the lists of its sampling along
MAX_SENT_TOKENS: Final = 1 << 21
PROMPTS_PER_TURN: Final = 16  # handed over before others' tokens pass
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


def _check_amount(body: GenerationRequest, n: int, prompts: Sequence[PromptText]) -> None:
    """Refuse what would keep everybody waiting while it is handed over.

    Raises:
        InvalidRequest: too many choices, or too many tokens in all of them.
    """
    if n * len(prompts) > MAX_CHOICES:
        raise InvalidRequest(f"n times the prompts is {n * len(prompts)}, over {MAX_CHOICES}", param="n")
    lists = (body.allowed_token_ids, body.stop_token_ids, body.logit_bias)
    num_listed = sum(len(entries or ()) for entries in lists)
    num_sent = n * sum(len(prompt.token_ids) + num_listed for prompt in prompts)
    if num_sent > MAX_SENT_TOKENS:
        raise InvalidRequest(
            f"the prompts and token lists of all choices are {num_sent:,} tokens, over {MAX_SENT_TOKENS:,}",
            hint="Send fewer prompts in a request, or a smaller n.",
            param="prompt" if n == 1 else "n",
        )


def _params_of_each(
    context: ServingContext, body: GenerationRequest, prompts: Sequence[PromptText]
) -> list[SamplingParams]:
    """The sampling of each prompt; those with room for the same output share it."""
    by_limit: dict[int, SamplingParams] = {}
    params = []
    for prompt in prompts:
        limit = output_limit(
            body, num_prompt_tokens=len(prompt.token_ids), defaults=context.defaults, limits=context.limits
        )
        if limit not in by_limit:
            by_limit[limit] = build_sampling_params(
                body, max_tokens=limit, defaults=context.defaults, limits=context.limits
            )
        params.append(by_limit[limit])
    return params


def _summary(params: SamplingParams) -> str:
    """The numbers for the log; lists are long, and texts are the client's own."""
    numbers = {field.name: getattr(params, field.name) for field in fields(params)}
    return ", ".join(f"{name} {value}" for name, value in numbers.items() if isinstance(value, int | float))


async def start_streams(
    context: ServingContext, body: GenerationRequest, meta: ResponseMeta, prompts: Sequence[PromptText]
) -> list[OutputStream]:
    """Validate all prompts, then hand them to the engine.

    Raises:
        InvalidRequest: whatever is wrong with one of them; nothing was started then.
        EngineDead: there is no engine any more.
    """
    _check_amount(body, meta.n, prompts)
    params = _params_of_each(context, body, prompts)
    streams: list[OutputStream] = []
    try:
        for number, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            if number % PROMPTS_PER_TURN == PROMPTS_PER_TURN - 1:
                await asyncio.sleep(0)
            request_id = f"{meta.response_id}-{next(context.request_numbers)}"
            if context.options.log_requests:
                logger.info("request %r: %d prompt tokens, %s", request_id, len(prompt.token_ids), _summary(sampling))
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
