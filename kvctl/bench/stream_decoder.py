"""Turns the events of one answer into counts and moments: which carried tokens, how far apart, how many.

Given (moment of the read, raw payload) pairs, in order and in slices, away from the moment of arrival: the time of an
event was taken when its bytes were read, so decoding late costs no accuracy. Keeps no payload. Events without any
generated token (a role, a finish reason, usage alone) count for nothing. Floor 3.

Most events of a stream differ in one string only. What surrounds that string is remembered from an event that was
parsed in full; an event with the same surroundings, and between them a string body without quote and without a
backslash at its end, has the same structure, so it is known without parsing it.
"""

import json
import math
from array import array
from collections.abc import Sequence
from json.decoder import JSONDecodeError
from typing import Any

from kvctl.metrics.log_histogram import MAX_BUCKET, PER_E, UNIT_S

DONE = b"[DONE]"
_BINS_PER_S = 10
_log = math.log


class StreamDecoder:
    """The state of one answer. Moments are perf_counter seconds; 0.0 means that it has not happened."""

    __slots__ = (
        "_prefix",
        "_suffix",
        "cached_tokens",
        "coalesced_events",
        "error",
        "events_per_bin",
        "finish_reason",
        "first_answer_s",
        "first_event_tokens",
        "first_s",
        "gap_buckets",
        "gap_sum_s",
        "is_done",
        "last_s",
        "malformed",
        "max_gap_s",
        "num_events",
        "output_tokens",
        "prompt_tokens",
        "reasoning_events",
        "text",
        "token_times_s",
        "usage_tokens",
    )

    def __init__(self, *, keep_text: bool = False, keep_times: bool = False) -> None:
        self._prefix = b""  # of an event with answer text, up to and with the opening quote; empty: none known
        self._suffix = b""
        self.num_events = 0
        self.first_s = 0.0
        self.first_answer_s = 0.0
        self.last_s = 0.0
        self.max_gap_s = 0.0
        self.gap_sum_s = 0.0
        self.gap_buckets: array[int] = array("H")
        self.coalesced_events = 0
        self.reasoning_events = 0
        self.events_per_bin: dict[int, int] = {}  # per 100 ms of the clock
        self.first_event_tokens = 0  # from continuous usage
        self.usage_tokens = 0  # as told so far
        self.output_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.malformed: str | None = None
        self.is_done = False
        self.text: list[str] | None = [] if keep_text else None
        self.token_times_s: array[float] | None = array("d") if keep_times else None

    def decode(self, times_s: Sequence[float], payloads: Sequence[bytes]) -> None:
        """Take events in order, each complete at its moment."""
        for time_s, payload in zip(times_s, payloads, strict=True):
            prefix = self._prefix
            if prefix and payload.startswith(prefix) and payload.endswith(self._suffix):
                body = payload[len(prefix) : -len(self._suffix)]
                if body and b'"' not in body and not body.endswith(b"\\"):
                    self._take_tokens(time_s, True)
                    continue
            self._decode_fully(time_s, payload)

    def _decode_fully(self, time_s: float, payload: bytes) -> None:
        if payload == DONE:
            self.is_done = True
            return
        try:
            event = json.loads(payload)
        except (JSONDecodeError, UnicodeDecodeError):
            self.malformed = f"an event is not JSON: {payload[:80]!r}"
            return
        if not isinstance(event, dict):
            self.malformed = f"an event is not an object: {payload[:80]!r}"
            return
        if event.get("error"):
            self.error = _error_text(event["error"])
            return
        listed = event.get("choices")
        choices: list[Any] = listed if isinstance(listed, list) else []
        has_token = is_answer = False
        for choice in choices:
            if not isinstance(choice, dict):
                self.malformed = f"a choice is not an object: {payload[:80]!r}"
                return
            answer, reasoning = _texts_of(choice)
            if answer or reasoning:
                has_token = True
                is_answer = is_answer or bool(answer)
                if self.text is not None and isinstance(answer, str):
                    self.text.append(answer)
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])
            elif isinstance(answer, str) and len(choices) == 1 and not event.get("usage") and self.text is None:
                self._learn(payload, answer)
        usage = event.get("usage")
        if isinstance(usage, dict):
            grown = self._take_usage(usage)
            if choices and grown:
                has_token = True  # a token whose text is held back, e.g. half of a character
            if has_token and self.num_events == 0:
                self.first_event_tokens = self.usage_tokens
        if has_token:
            self._take_tokens(time_s, is_answer)

    def _learn(self, payload: bytes, answer: str) -> None:
        """Remember what surrounds the answer, where it is plain text that occurs once as a whole string."""
        if not (answer.isascii() and answer.isprintable()) or '"' in answer or "\\" in answer:
            return
        quoted = b'"%b"' % answer.encode()
        start = payload.find(quoted)
        if start >= 0 and payload.find(quoted, start + 1) < 0:
            self._prefix = payload[: start + 1]
            self._suffix = payload[start + len(quoted) - 1 :]

    def _take_usage(self, usage: dict[str, Any]) -> bool:
        grown = False
        completion, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if isinstance(completion, int):
            grown = completion > self.usage_tokens
            self.usage_tokens = max(self.usage_tokens, completion)
            self.output_tokens = completion
        if isinstance(prompt, int):
            self.prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            self.cached_tokens = details["cached_tokens"]
        return grown

    def _take_tokens(self, time_s: float, is_answer: bool) -> None:
        if self.num_events:
            gap_s = time_s - self.last_s
            if gap_s > UNIT_S:  # log_histogram.gap_bucket, without the call
                bucket = 1 + int(_log(gap_s / UNIT_S) * PER_E)
                self.gap_buckets.append(bucket if bucket < MAX_BUCKET else MAX_BUCKET)
                self.gap_sum_s += gap_s
                if gap_s > self.max_gap_s:
                    self.max_gap_s = gap_s
            else:
                self.gap_buckets.append(0)
                self.coalesced_events += 1
        else:
            self.first_s = time_s
        if not is_answer:
            self.reasoning_events += 1
        elif not self.first_answer_s:
            self.first_answer_s = time_s
        self.num_events += 1
        self.last_s = time_s
        index = int(time_s * _BINS_PER_S)
        bins = self.events_per_bin
        bins[index] = bins.get(index, 0) + 1
        if self.token_times_s is not None:
            self.token_times_s.append(time_s)


def _texts_of(choice: dict[str, Any]) -> tuple[object, object]:
    """(answer, reasoning) of one choice; either may be empty. Tool calls are answers: they are generated too."""
    text = choice.get("text")
    if text is not None:
        return text or choice.get("token_ids"), None
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return None, None
    answer = delta.get("content") or delta.get("tool_calls") or delta.get("refusal") or delta.get("function_call")
    return answer, delta.get("reasoning_content") or delta.get("reasoning")


def _error_text(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error.get("type") or error)
    return str(error)
