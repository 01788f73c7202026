"""What the rules of the diagnosis look at: a snapshot, the session's history, and what follows from both.

Pure. Observations that more than one rule needs are computed here once, each named for what it claims. Floor 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvctl.metrics.histogram import Histogram
from kvctl.top.snapshot import Snapshot

KV_HIGH = 0.9  # of the blocks held: the next request of any size may not fit
_QUEUE_SHARE = 0.6  # of the readings with somebody waiting: a queue, not an arrival seen in passing
_STEP_FULL = 0.75  # mean step tokens of the budget
_FLAT_SHARE = 0.7  # of the readings at the same number of running requests
_MIN_FLAT_READINGS = 3
_LARGE_STEP = 16  # tokens: below it a step may be full of decodes only
_NOT_TRIED = "new"  # kvctl's reason for a request that has just come


@dataclass(frozen=True, slots=True)
class Point:
    """One interval between two scrapes: what graphs draw and what the diagnosis compares over the session."""

    at_s: float
    running: float | None
    waiting: float | None
    kv_usage: float | None
    generation_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    itl_mean_s: float | None
    ttft_mean_s: float | None
    prefix_hit_rate: float | None
    preemptions_per_s: float | None


@dataclass(frozen=True)
class Case:
    """One engine's snapshot with the points of the session so far, oldest first."""

    now: Snapshot
    history: Sequence[Point] = ()

    @cached_property
    def waiting_share(self) -> float:
        """Share of the readings in which somebody waited."""
        waiting = self.now.trace.waiting
        return sum(1 for value in waiting if value > 0) / len(waiting) if waiting else 0.0

    @cached_property
    def waiting_mean(self) -> float:
        """Mean number of waiting requests over the window."""
        waiting = self.now.trace.waiting
        return sum(waiting) / len(waiting) if waiting else 0.0

    @cached_property
    def is_queueing(self) -> bool:
        """Whether requests wait, not only pass through the queue."""
        waiting = self.now.trace.waiting
        return self.waiting_share >= _QUEUE_SHARE or (0 < len(waiting) <= 2 and waiting[-1] > 0)

    @cached_property
    def kv_mean(self) -> float | None:
        """Mean KV usage over the window."""
        usage = self.now.trace.kv_usage
        return sum(usage) / len(usage) if usage else self.now.kv_usage

    @cached_property
    def kv_peak(self) -> float | None:
        """Highest KV usage in the window."""
        return max(self.now.trace.kv_usage, default=self.now.kv_usage)

    @cached_property
    def is_kv_tight(self) -> bool:
        """Whether the next request could not count on finding its blocks, on average over the window."""
        if self.kv_mean is None or self.kv_peak is None:
            return False
        if self.kv_mean >= KV_HIGH or (self.kv_peak >= 0.97 and self.kv_mean >= 0.8):
            return True
        size, capacity = self.now.request_size, self.now.kv_capacity_tokens
        if size is None or capacity is None:
            return False
        free = (1 - self.kv_mean) * capacity
        return self.kv_mean >= 0.5 and free < max(size.prompt_tokens, size.tokens / 2)

    @cached_property
    def running_mean(self) -> float:
        """Mean number of running requests over the window."""
        running = self.now.trace.running
        return sum(running) / len(running) if running else 0.0

    @cached_property
    def seats_taken(self) -> float | None:
        """Running requests as a share of max_num_seqs; None where the server does not say its maximum."""
        return self.running_mean / self.now.max_num_seqs if self.now.max_num_seqs else None

    @cached_property
    def flat_top(self) -> tuple[int, float] | None:
        """The number of running requests the window stays at, and the share of readings there.

        None where it moves, or where the session has seen more running requests than that.
        """
        running = self.now.trace.running
        if not running or max(running) < 1 or self.moved is False:  # where nothing moves, everything is flat
            return None
        top = max(running)
        share = sum(1 for value in running if value == top) / len(running)
        seen = max((point.running for point in self.history if point.running is not None), default=top)
        if share < _FLAT_SHARE or seen > top:
            return None
        return int(top), share

    @cached_property
    def is_flat_top_proven(self) -> bool:
        """Whether enough readings show the flat top."""
        return len(self.now.trace.running) >= _MIN_FLAT_READINGS

    @cached_property
    def prefill_share(self) -> float | None:
        """Share of the computed tokens that belong to prompts; None where nothing was computed or said."""
        prompt, output = self.now.computed_prompt_tokens_per_s, self.now.generation_tokens_per_s
        if prompt is None or output is None or prompt + output <= 0:
            return None
        return prompt / (prompt + output)

    @cached_property
    def budget_used(self) -> float | None:
        """Mean tokens per step as a share of max_num_batched_tokens; None where either is not known."""
        steps, budget = self.now.step_tokens, self.now.max_num_batched_tokens
        if steps is None or steps.mean is None or not budget:
            return None
        return steps.mean / budget

    @cached_property
    def are_steps_full(self) -> bool:
        """Whether most steps compute as many tokens as they may, by a budget that the server states."""
        histogram, budget = self.now.step_tokens_histogram, self.now.max_num_batched_tokens
        if self.budget_used is None or histogram is None or budget is None:
            return False
        return self.budget_used >= _STEP_FULL or (full_share(histogram, budget) >= 0.5 and self.budget_used >= 0.5)

    @cached_property
    def do_steps_look_full(self) -> bool:
        """Whether most steps are of one large size and full of prompts, where the budget itself is not said."""
        histogram = self.now.step_tokens_histogram
        top = histogram.top_bucket() if histogram is not None else None
        if top is None or self.now.max_num_batched_tokens is not None or self.now.step_tokens is None:
            return False
        return top[0] >= _LARGE_STEP and top[2] >= 0.6 and (self.prefill_share or 0.0) >= 0.7

    @cached_property
    def moved(self) -> bool | None:
        """Whether the server computed or finished anything in the window; None where no counter says."""
        now = self.now
        rates = (now.generation_tokens_per_s, now.prompt_tokens_per_s, now.steps_per_s, now.finished_per_s)
        said = [rate for rate in rates if rate is not None]
        return any(rate > 0 for rate in said) if said else None

    @cached_property
    def requests_seen(self) -> float:
        """How many requests the window knows of, by the histogram with most of them."""
        spreads = (self.now.ttft_s, self.now.queue_s, self.now.e2e_s)
        return max((spread.count for spread in spreads if spread is not None), default=0.0)

    @cached_property
    def prompt_tokens_mean(self) -> float | None:
        """Mean prompt of the requests that got their first token in the window; else of the observed size."""
        now = self.now
        if now.ttft_s is not None and now.prompt_tokens_per_s is not None and now.window_s is not None:
            return now.prompt_tokens_per_s * now.window_s / now.ttft_s.count
        return None if now.request_size is None else now.request_size.prompt_tokens

    def reason_share(self, *reasons: str) -> float | None:
        """Share of the waiting requests that the server itself puts down to these reasons; None if it does not say."""
        total = sum(count for reason, count in self.now.waiting_reasons.items() if reason != _NOT_TRIED)
        if total <= 0:
            return None
        return sum(self.now.waiting_reasons.get(reason, 0.0) for reason in reasons) / total

    def miss_share(self, *reasons: str) -> float | None:
        """Share of the tokens not found in the prefix cache that the server puts down to these reasons."""
        total = sum(self.now.miss_reasons.values())
        if total <= 0:
            return None
        return sum(self.now.miss_reasons.get(reason, 0.0) for reason in reasons) / total


def full_share(histogram: Histogram, budget: float) -> float:
    """Share of the steps in the bucket that holds `budget`, or above it (a step's outputs come on top)."""
    below = max((bound for bound in histogram.bounds if bound < budget), default=0.0)
    return histogram.share_above(below) or 0.0
