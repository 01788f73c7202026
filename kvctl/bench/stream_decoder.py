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
from itertools import pairwise
from json.decoder import JSONDecodeError
from typing import Any

from kvctl.metrics.log_histogram import MAX_BUCKET, PER_E, UNIT_S

DONE = b"[DONE]"
_BINS_PER_S = 10
_log = math.log


class StreamDecoder:
    """The state of one answer. Moments are perf_counter seconds; 0.0 means that it has not happened."""

    __slots__ = (
        "_is_answer",
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
        self._prefix = b""  # of an event with text, up to and with the opening quote; empty: none known
        self._suffix = b""
        self._is_answer = True  # else reasoning
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
        prefix, suffix, is_answer = self._prefix, self._suffix, self._is_answer
        run_s: list[float] = []  # moments of events in a row that need no parsing
        for time_s, payload in zip(times_s, payloads, strict=True):
            if prefix and payload.startswith(prefix) and payload.endswith(suffix):
                body = payload[len(prefix) : -len(suffix)]
                if body and b'"' not in body and not body.endswith(b"\\"):
                    run_s.append(time_s)
                    continue
            if run_s:
                self._take_tokens(run_s, is_answer)
                run_s = []
            self._decode_fully(time_s, payload)
            prefix, suffix, is_answer = self._prefix, self._suffix, self._is_answer
        if run_s:
            self._take_tokens(run_s, is_answer)

    def _decode_fully(self, time_s: float, payload: bytes) -> None:
        if payload == DONE:
            self.is_done = True
            return
        try:
            event = json.loads(payload.decode())
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
        has_token = is_answer = has_finished = False
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
                has_finished = True
            elif len(choices) == 1 and not event.get("usage") and self.text is None:
                self._learn(payload, answer, reasoning)
        usage = event.get("usage")
        if isinstance(usage, dict):
            was_told = self.output_tokens is not None
            grown = self._take_usage(usage)
            if choices and grown and (was_told or not has_finished or not self.num_events):
                # A token whose text is held back, e.g. half of a character. Usage that comes but once, with the finish
                # reason, counts the tokens that came before it.
                has_token = True
            if has_token and self.num_events == 0:
                self.first_event_tokens = self.usage_tokens
        if has_token:
            self._take_tokens((time_s,), is_answer)

    def _learn(self, payload: bytes, answer: object, reasoning: object) -> None:
        """Remember what surrounds the text, where it is plain text that occurs once as a whole string."""
        text = answer or reasoning
        if not isinstance(text, str) or (answer and reasoning):
            return
        if not (text.isascii() and text.isprintable()) or '"' in text or "\\" in text:
            return
        quoted = b'"%b"' % text.encode()
        start = payload.find(quoted)
        if start >= 0 and payload.find(quoted, start + 1) < 0:
            self._prefix = payload[: start + 1]
            self._suffix = payload[start + len(quoted) - 1 :]
            self._is_answer = bool(answer)

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

    def _take_tokens(self, times_s: Sequence[float], is_answer: bool) -> None:
        """Count events with tokens, all of the answer proper or all of reasoning."""
        first_s = times_s[0]
        if self.num_events:
            gaps_s = [first_s - self.last_s]
        else:
            gaps_s = []
            self.first_s = first_s
        gaps_s += [later_s - earlier_s for earlier_s, later_s in pairwise(times_s)]
        if gaps_s:  # log_histogram.gap_bucket, without a call for each
            buckets = [1 + int(_log(gap_s / UNIT_S) * PER_E) if gap_s > UNIT_S else 0 for gap_s in gaps_s]
            longest_s = max(gaps_s)
            if longest_s > self.max_gap_s:
                self.max_gap_s = longest_s
                if max(buckets) > MAX_BUCKET:
                    buckets = [min(bucket, MAX_BUCKET) for bucket in buckets]
            self.gap_buckets.extend(buckets)
            self.gap_sum_s += sum(gaps_s)
            self.coalesced_events += buckets.count(0)
        if not is_answer:
            self.reasoning_events += len(times_s)
        elif not self.first_answer_s:
            self.first_answer_s = first_s
        self.num_events += len(times_s)
        self.last_s = times_s[-1]
        bins = self.events_per_bin
        for time_s in times_s:
            index = int(time_s * _BINS_PER_S)
            bins[index] = bins.get(index, 0) + 1
        if self.token_times_s is not None:
            self.token_times_s.extend(times_s)


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
