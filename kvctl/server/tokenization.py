"""POST /tokenize and /detokenize. One of them works at a time: they are open to everybody. Floor 3."""

import asyncio
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from kvctl.errors import InvalidRequest
from kvctl.server.body import parse_json
from kvctl.server.chat import encode_chat
from kvctl.server.context import ServingContext
from kvctl.server.errors import json_response
from kvctl.server.prompts import encode
from kvctl.server.protocol import Body, DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest

INLINE_TOKENS: Final = 4096  # a thread is worth its price from here on


class _Kind(Body):
    """Just enough of a body to tell a conversation from a text."""

    messages: Any = None


async def tokenize(context: ServingContext, http: Request) -> Response:
    """POST /tokenize: token ids of a text, or of a conversation as the chat endpoint would render it."""
    data = await context.bodies.receive_json(http)
    body: TokenizeChatRequest | TokenizeCompletionRequest
    if parse_json(data, _Kind).messages is not None:
        body = parse_json(data, TokenizeChatRequest)
        context.model.check(body.model)
        async with context.keyless_work:
            token_ids = await encode_chat(context, body)
    else:
        body = parse_json(data, TokenizeCompletionRequest)
        context.model.check(body.model)
        async with context.keyless_work:
            token_ids = await encode(
                context.tokenizer,
                body.prompt,
                add_special_tokens=body.add_special_tokens is not False,
                max_model_len=context.limits.max_model_len,
            )
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": context.limits.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [context.texts(token_id)[0] for token_id in token_ids]
    return json_response(answer)


async def detokenize(context: ServingContext, http: Request) -> Response:
    """POST /detokenize: the text of token ids, special tokens included."""
    body = await context.bodies.read_json(http, DetokenizeRequest)
    context.model.check(body.model)
    largest = max(body.tokens, default=0)
    if largest >= context.limits.vocab_size:
        raise InvalidRequest(f"tokens has {largest}, the vocabulary has {context.limits.vocab_size}", param="tokens")
    if len(body.tokens) <= INLINE_TOKENS:
        text = context.tokenizer.decode(body.tokens, skip_special_tokens=False)
    else:
        async with context.keyless_work:
            text = await asyncio.to_thread(context.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})
