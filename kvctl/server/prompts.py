"""From a body's prompt or messages to token ids that fit the model.

Knows no engine. Long texts are tokenized in a thread, so that nobody's stream stands still meanwhile (the tokenizer
gives up the interpreter lock). Floor 3.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

from kvctl.engine.tokenizer import Tokenizer
from kvctl.errors import FeatureNotServed, InvalidRequest
from kvctl.server.protocol import ChatFields, ChatMessage, GenerationRequest

INLINE_CHARS: Final = 2_000  # about a millisecond of tokenizing; a thread costs a tenth of one
MAX_CHARS_PER_TOKEN: Final = 256  # no token of a usual vocabulary is longer
_RESERVED_TEMPLATE_KWARGS: Final = (
    *("messages", "tools", "documents", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message"),
)


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, max_model_len: int) -> list[int]:
    """Tokenize one text.

    Raises:
        InvalidRequest: so long that it cannot fit, seen before tokenizing it.
    """
    if len(text) > max_model_len * MAX_CHARS_PER_TOKEN:
        raise InvalidRequest(
            f"the prompt has {len(text)} characters, more than {max_model_len} tokens can hold",
            hint="Shorten it.",
            param="input_text",
        )
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def truncate(token_ids: list[int], request: GenerationRequest, *, max_model_len: int, max_tokens: int) -> list[int]:
    """Cut a prompt as the request asks; -1 leaves just room for the output.

    Raises:
        InvalidRequest: 0, or more than the model's length.
    """
    limit = request.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit == -1:
        limit = max(1, max_model_len - max(1, max_tokens))
    if limit < 1 or limit > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or 1 to {max_model_len} (the model's length), got {limit}",
            param="truncate_prompt_tokens",
        )
    return token_ids[:limit] if request.truncation_side == "right" else token_ids[-limit:]


def check_fits(token_ids: list[int], *, max_model_len: int, vocab_size: int) -> None:
    """Refuse a prompt that is empty, leaves no room for a token, or holds ids the model does not know.

    Raises:
        InvalidRequest: with the numbers.
    """
    if not token_ids:
        raise InvalidRequest("the prompt is empty", hint="Send at least one token.", param="prompt")
    if len(token_ids) >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(token_ids)} tokens, the model's length is {max_model_len} for prompt and output "
            "together",
            hint="Shorten it, or set truncate_prompt_tokens.",
            param="input_tokens",
        )
    largest = max(token_ids)
    if largest >= vocab_size:
        raise InvalidRequest(f"the prompt has the token id {largest}, the vocabulary has {vocab_size}", param="prompt")


def _plain_content(message: ChatMessage) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for part in message.content:
        if part.type not in ("text", "input_text"):
            raise FeatureNotServed(
                f"a message has a part of type {part.type[:80]!r}, only 'text' is served here", param="messages"
            )
        if part.text is None:
            raise InvalidRequest("a text part has no text", param="messages")
        texts.append(part.text)
    return "\n".join(texts)


def _with_parsed_arguments(tool_calls: Any) -> Any:
    """Chat templates read the arguments of earlier tool calls as objects; clients send them as JSON text."""
    parsed = []
    for call in tool_calls if isinstance(tool_calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise InvalidRequest("the arguments of a tool call are not JSON", param="messages") from None
            call = call | {"function": function | {"arguments": arguments}}
        parsed.append(call)
    return parsed


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content is text.

    Raises:
        FeatureNotServed: a part that is no text (an image, say).
        InvalidRequest: a broken part or tool call.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        entry = {"role": message.role, "content": _plain_content(message)} | (message.model_extra or {})
        if entry.get("tool_calls"):
            entry["tool_calls"] = _with_parsed_arguments(entry["tool_calls"])
        plain.append(entry)
    return plain


def check_conversation(messages: list[ChatMessage], *, max_model_len: int) -> None:
    """Refuse a conversation that cannot fit before a template spends seconds on it: each part takes a token at least.

    Raises:
        InvalidRequest: with the number of messages or parts.
    """
    num_parts = sum(len(m.content) if isinstance(m.content, list) else 1 for m in messages)
    if max(num_parts, len(messages)) > max_model_len:
        raise InvalidRequest(
            f"the conversation has {len(messages)} messages of {num_parts} parts in all, more than {max_model_len} "
            "tokens can hold",
            hint="Shorten it.",
            param="messages",
        )


def template_arguments(
    request: ChatFields, *, trust_template: bool, default_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `Tokenizer.apply_chat_template` and `ChatTemplate.render` for a conversation.

    Raises:
        InvalidRequest: contradicting options, or an untrusted template.
    """
    add_generation_prompt = request.add_generation_prompt
    if request.continue_final_message:
        if add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        add_generation_prompt = False
    if request.chat_template is not None and not trust_template:
        raise InvalidRequest(
            "a chat template in the request is not trusted here",
            hint="Start the server with --trust-request-chat-template to allow it.",
            param="chat_template",
        )
    kwargs = dict(default_kwargs) | (request.chat_template_kwargs or {})
    for name in _RESERVED_TEMPLATE_KWARGS:
        if name in kwargs:
            raise InvalidRequest(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")
    reasoning_effort = getattr(request, "reasoning_effort", None)
    if reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", reasoning_effort)
    return {
        "messages": plain_messages(request.messages),
        "tools": request.tools or None,
        "documents": request.documents or None,
        "add_generation_prompt": True if add_generation_prompt is None else add_generation_prompt,
        "continue_final_message": bool(request.continue_final_message),
        "variables": kwargs,
    }
