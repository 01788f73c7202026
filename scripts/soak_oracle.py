"""What must hold in a soak: every answer as it was alone, every counter as clients saw it, every resource flat.

Knows no connections (soak_clients.py) and no schedule (soak.py). Not a command.
"""

import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server_under_test import Page, total

WORDS = ("river", "stone", "cloud", "engine", "garden", "window", "silver", "number", "bridge", "letter", "paper")
MIN_ROUNDS = 4  # fewer show no growth
RSS_SLACK = 1.05  # of the level once warm
RSS_SLACK_BYTES = 24 << 20
ENDS = "vllm:request_success_total"  # one per child, by reason


@dataclass(frozen=True)
class Case:
    """A request whose answer is known once it ran alone; `texts` per choice."""

    path: str
    body: dict[str, Any]
    num_choices: int
    texts: tuple[str, ...] = ()
    num_tokens: int = 0
    num_prompt_tokens: int = 0


@dataclass
class Tally:
    """What clients saw, and everything that must not have happened."""

    violations: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    ended_children: int = 0
    left_children: int = 0  # of requests whose client left: ended or aborted, the server decides
    completion_tokens: int = 0
    prompt_tokens: int = 0

    def violate(self, text: str) -> None:
        """Note something that must not happen."""
        self.violations.append(text)
        print(f"VIOLATION: {text}", file=sys.stderr, flush=True)

    def count(self, num_choices: int, usage: dict[str, Any]) -> None:
        """Note an answer that came whole."""
        self.ended_children += num_choices
        self.completion_tokens += usage["completion_tokens"]
        self.prompt_tokens += usage["prompt_tokens"] * num_choices

    def check(self, case: Case, texts: dict[int, str], usage: dict[str, Any]) -> None:
        """Compare an answer with the one that the same request got alone."""
        if not usage:
            self.violate("no usage came")
            return
        self.count(case.num_choices, usage)
        found = tuple(texts[index] for index in sorted(texts))
        if found != case.texts:
            self.violate(f"text differs from the one alone: {case.body}\n  alone {case.texts}\n  now   {found}")
        if (usage["completion_tokens"], usage["prompt_tokens"]) != (case.num_tokens, case.num_prompt_tokens):
            self.violate(f"tokens differ from those alone ({case.num_tokens}): {usage}: {case.body}")


def words(dice: random.Random, count: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(count))


def make_cases(dice: random.Random, model: str, count: int) -> list[Case]:
    """Greedy, seeded and n > 1 requests, with and without a shared prefix, from a few tokens to hundreds."""
    shared = words(dice, 150)
    cases = []
    for number in range(count):
        length = dice.choice((1, 5, 20, 60, 250))
        prompt = (shared + " " if number % 3 == 0 else "") + words(dice, length)
        body: dict[str, Any] = {"model": model, "max_tokens": dice.choice((1, 8, 24, 40)), "temperature": 0}
        body["truncate_prompt_tokens"] = 700  # of a tokenizer with few words
        n = 1
        if number % 4 == 1:
            n = dice.choice((1, 2, 4))
            body |= {"temperature": 0.9, "seed": number, "n": n, "top_p": 0.95}
        if number % 5 == 2:
            body |= {"stop": [" the", "\n\n", "river st"]}
        if number % 6 == 3:
            body |= {"ignore_eos": True, "min_tokens": 4 if body["max_tokens"] > 4 else 0}
        if number % 7 == 4:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
        if number % 5 == 4:
            messages = [{"role": "system", "content": shared[:200]}, {"role": "user", "content": prompt[-300:]}]
            cases.append(Case("/v1/chat/completions", {**body, "messages": messages}, n))
        else:
            cases.append(Case("/v1/completions", {**body, "prompt": prompt}, n))
    return cases


def check_page(tally: Tally, page: Page) -> None:
    """All counters of an idle server must add up, and agree with what clients saw."""

    def must(what: str, holds: bool, *values: float) -> None:
        if not holds:
            tally.violate(f"/metrics: {what}: {values}")

    accepted, ended = total(page, "kvctl:requests_accepted_total"), total(page, ENDS)
    must("accepted = success + abort + error", accepted == ended, accepted, ended)
    finished = sum(total(page, ENDS, finished_reason=reason) for reason in ("stop", "length"))
    aborted, failed = (total(page, ENDS, finished_reason=reason) for reason in ("abort", "error"))
    must("no request failed", failed == 0, failed)
    known, left = tally.ended_children, tally.left_children
    must("every answer that clients got is counted", finished >= known, finished, known)
    must("nothing else is counted", finished + aborted <= known + left, finished, aborted, known, left)
    prompt = total(page, "vllm:prompt_tokens_total")
    by_source = total(page, "vllm:prompt_tokens_by_source_total")
    must("prompt tokens = computed + cached", prompt == by_source, prompt, by_source)
    must("prompt tokens cover what clients were told", prompt >= tally.prompt_tokens, prompt, tally.prompt_tokens)
    made, got = total(page, "vllm:generation_tokens_total"), tally.completion_tokens
    must("generated tokens cover what clients got", made >= got, made, got)
    queries, hits = total(page, "vllm:prefix_cache_queries_total"), total(page, "vllm:prefix_cache_hits_total")
    missed = total(page, "kvctl:prefix_cache_miss_tokens_total")
    must("prefix queries = hits + misses", queries == hits + missed, queries, hits, missed)
    for name in ("vllm:request_prompt_tokens", "vllm:request_params_max_tokens"):
        count = total(page, f"{name}_count")
        must(f"one sample of {name} per ended request", count == ended, count, ended)


def check_flat(tally: Tally, samples: Sequence[dict[str, float]]) -> None:
    """Compare the idle server's resources late with those once warm."""
    if len(samples) < MIN_ROUNDS:
        tally.violate(f"only {len(samples)} rounds: too few to see growth")
        return
    half = len(samples) // 2
    early, late = samples[1 : half + 1], samples[-max(2, len(samples) // 4) :]
    for name in samples[0]:
        before, after = max(s[name] for s in early), statistics.median(s[name] for s in late)
        limit = before
        if name.endswith("_bytes"):
            limit = before * RSS_SLACK + RSS_SLACK_BYTES
        elif name == "api threads":  # asyncio's pool fills up to its bound when long texts are tokenized
            limit = max(before, 2 + min(32, (os.cpu_count() or 1) + 4))
        if after > limit:
            tally.violate(f"{name} grew from {before:,.0f} to {after:,.0f}")
