"""What the scripted server does with one request: which bytes, at which moment after the request arrived.

Pure: no sockets, no clock. A `MockScript` is the configuration; `StreamPlan` the writes of one answer. Times are
seconds after the answer began. Floor 3.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvctl.errors import ConfigError

Endpoint = Literal["completions", "chat"]
FAULTS = ("error", "cut", "429", "503", "500", "html", "hang")
_TRICKLE_STEP_S = 1e-3


@dataclass(frozen=True)
class MockScript:
    """How the scripted server answers. All requests alike, but for the share that meets `fault`."""

    ttft_s: float = 0.05
    gap_s: float = 0.01  # per token: an event of four tokens follows four gaps after the one before
    tokens: int | None = 32  # None: as many as the request's max_tokens
    tokens_per_event: int = 1
    role_delta: bool = True  # chat: an event with the role and no text, at once
    finish_delta: bool = True  # an event with the finish reason and no text, after the last token
    reasoning_tokens: int = 0  # chat: the first so many tokens are reasoning
    usage: bool = True  # whether usage is told when it is asked for
    event_bytes: int = 0  # each event's text is padded to this many bytes
    trickle_bytes: int = 0  # each event is written in pieces of so many bytes, 1 ms apart
    fault: str | None = None
    fault_share: float = 1.0
    fault_after_tokens: int = 4  # `error` and `cut`: after so many tokens
    retry_after_s: float | None = 1.0
    slots: int = 0  # streams running at once; more wait in line (0: no limit)
    tokens_per_word: float = 1.0  # how the prompt is counted
    prompt_overhead_tokens: int = 0  # tokens a chat template adds
    prefix_cache: bool = False
    api_key: str | None = None
    model: str = "mock"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fault is not None and self.fault not in FAULTS:
            raise ConfigError(f"unknown fault {self.fault!r}", hint=f"One of: {', '.join(FAULTS)}.")
        if self.tokens_per_event < 1 or (self.tokens is not None and self.tokens < 1):
            raise ConfigError("a stream needs at least one token and one token per event")
        if self.ttft_s < 0 or self.gap_s < 0 or not 0 <= self.fault_share <= 1:
            raise ConfigError("times cannot be negative, and a share lies between 0 and 1")


@dataclass(frozen=True)
class Write:
    """Bytes to send `at_s` after the answer began; `num_tokens` > 0 marks the end of an event with tokens."""

    at_s: float
    data: bytes
    num_tokens: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """The writes of one streamed answer in order; `cut`: the connection is closed after the last."""

    writes: Sequence[Write]
    cut: bool = False


def chunk(payload: bytes) -> bytes:
    """Frame bytes as one chunk of HTTP/1.1 chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def sse_event(value: dict[str, Any]) -> bytes:
    """One server-sent event with JSON data, framed as a chunk."""
    return chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int) -> dict[str, Any]:
    """The `usage` object of an OpenAI-compatible answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


class StreamWriter:
    """Builds the plans of one script. Plans of equal requests are built once and shared."""

    def __init__(self, script: MockScript) -> None:
        self._script = script
        self._cache: dict[tuple[object, ...], StreamPlan] = {}

    def plan(
        self,
        endpoint: Endpoint,
        num_tokens: int,
        *,
        fault: str | None,
        include_usage: bool,
        continuous_usage: bool,
        prompt_tokens: int,
        cached_tokens: int,
    ) -> StreamPlan:
        """The writes that answer one request with `num_tokens` tokens."""
        key = (endpoint, num_tokens, fault, include_usage, continuous_usage, prompt_tokens, cached_tokens)
        plan = self._cache.get(key)
        if plan is None:
            if len(self._cache) > 256:
                self._cache.clear()
            plan = self._cache[key] = self._build(*key)
        return plan

    def _build(
        self,
        endpoint: Endpoint,
        num_tokens: int,
        fault: str | None,
        include_usage: bool,
        continuous_usage: bool,
        prompt_tokens: int,
        cached_tokens: int,
    ) -> StreamPlan:
        script = self._script
        tells_usage = script.usage and include_usage
        writes: list[Write] = []
        if endpoint == "chat" and script.role_delta:
            writes.append(Write(0.0, sse_event(self._chat_event({"role": "assistant", "content": ""}, None))))
        sent = 0
        reasoning = script.reasoning_tokens if endpoint == "chat" else 0
        while sent < num_tokens:
            count = min(script.tokens_per_event, num_tokens - sent)
            if sent < reasoning:
                count = min(count, reasoning - sent)
            text = " tok" * count
            if script.event_bytes > len(text):
                text += "x" * (script.event_bytes - len(text))
            if endpoint == "completions":
                event = self._completion_event(text, None)
            else:
                event = self._chat_event({"reasoning_content" if sent < reasoning else "content": text}, None)
            at_s = script.ttft_s + sent * script.gap_s
            sent += count
            if tells_usage and continuous_usage:
                event["usage"] = usage_of(prompt_tokens, sent, cached_tokens, min(sent, reasoning))
            writes.extend(_trickle(Write(at_s, sse_event(event), count), script.trickle_bytes))
            if fault in ("error", "cut") and sent >= script.fault_after_tokens:
                if fault == "cut":
                    return StreamPlan(writes, cut=True)
                error = {"message": "the engine has failed", "type": "InternalServerError", "code": 500}
                writes.append(Write(at_s, sse_event({"error": error}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"))
                return StreamPlan(writes)
        end = b""
        if script.finish_delta:
            empty = self._completion_event("", "length")
            end += sse_event(empty if endpoint == "completions" else self._chat_event({}, "length"))
        if tells_usage:
            last = self._completion_event("", None) if endpoint == "completions" else self._chat_event({}, None)
            last["choices"] = []
            last["usage"] = usage_of(prompt_tokens, num_tokens, cached_tokens, reasoning)
            end += sse_event(last)
        end += chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        writes.append(Write(writes[-1].at_s, end))
        return StreamPlan(writes)

    def _completion_event(self, text: str, finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {
            "id": "cmpl-mock",
            "object": "text_completion",
            "created": 1,
            "model": self._script.model,
            "choices": [choice],
        }

    def _chat_event(self, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {
            "id": "chatcmpl-mock",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": self._script.model,
            "choices": [choice],
        }


def whole_answer(script: MockScript, endpoint: Endpoint, num_tokens: int, usage: dict[str, Any]) -> dict[str, Any]:
    """The JSON object that answers a request without `stream`."""
    text = " tok" * num_tokens
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    if endpoint == "chat":
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = "chat.completion" if endpoint == "chat" else "text_completion"
    return {
        "id": "mock",
        "object": kind,
        "created": 1,
        "model": script.model,
        "choices": [choice],
        "usage": usage,
    }


def _trickle(write: Write, piece_bytes: int) -> list[Write]:
    if piece_bytes <= 0 or len(write.data) <= piece_bytes:
        return [write]
    pieces = [write.data[i : i + piece_bytes] for i in range(0, len(write.data), piece_bytes)]
    first_s = max(0.0, write.at_s - (len(pieces) - 1) * _TRICKLE_STEP_S)
    step_s = (write.at_s - first_s) / (len(pieces) - 1)
    parts = [Write(first_s + i * step_s, piece) for i, piece in enumerate(pieces)]
    parts[-1] = replace(parts[-1], at_s=write.at_s, num_tokens=write.num_tokens)
    return parts
