"""What the scripted server knows of itself: which answers run and wait, how prompts are counted, what it has written.

No sockets. Floor 3.
"""

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvctl.bench.mock_script import MockScript, StreamWriter
from kvctl.bench.precise_timer import PreciseTimer
from kvctl.bench.wire import ArrivalClock

_BLOCK_WORDS = 16  # unit of the pretended prefix cache


@dataclass
class StreamLog:
    """When one request arrived and its events were written (perf_counter seconds)."""

    request_id: str
    received_s: float
    written_s: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass
class MockState:
    """What all connections of one scripted server share."""

    script: MockScript
    timer: PreciseTimer
    clock: ArrivalClock
    writer: StreamWriter
    rng: random.Random
    log: list[StreamLog] = field(default_factory=list)
    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    num_running: int = 0
    max_running: int = 0
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seen_blocks: set[int] = field(default_factory=set)

    def start_or_queue(self, start: Callable[[], None]) -> None:
        """Begin an answer now, or when a slot is free."""
        if self.script.slots and self.num_running >= self.script.slots:
            self.waiting.append(start)
            return
        self._begin(start)

    def _begin(self, start: Callable[[], None]) -> None:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        start()

    def finish(self) -> None:
        """An answer has ended: the next in line begins."""
        self.num_running -= 1
        if self.waiting:
            self._begin(self.waiting.popleft())

    def metrics_text(self) -> str:
        """A `/metrics` page with the names that vLLM's users know."""
        label = f'{{model_name="{self.script.model}",engine="0"}}'
        usage = self.num_running / self.script.slots if self.script.slots else 0.0
        rows = (
            ("gauge", "num_requests_running", "", self.num_running),
            ("gauge", "num_requests_waiting", "", len(self.waiting)),
            ("gauge", "kv_cache_usage_perc", "", usage),
            ("counter", "prefix_cache_queries", "_total", self.prompt_tokens),
            ("counter", "prefix_cache_hits", "_total", self.cached_tokens),
            ("counter", "prompt_tokens", "_total", self.prompt_tokens),
            ("counter", "generation_tokens", "_total", self.output_tokens),
            ("counter", "num_preemptions", "_total", 0),
        )
        lines = []
        for kind, name, suffix, value in rows:
            lines += [
                f"# HELP vllm:{name} Scripted.",
                f"# TYPE vllm:{name} {kind}",
                f"vllm:{name}{suffix}{label} {value}",
            ]
        return "\n".join(lines) + "\n"

    def count_prompt(self, prompt: str, num_ids: int) -> tuple[int, int]:
        """Tokens of a prompt and how many of them were seen before as a prefix."""
        words = prompt.split()
        num_tokens = num_ids or round(len(words) * self.script.tokens_per_word) + prompt.count(".")
        cached_words = 0
        if self.script.prefix_cache:
            block_hash, is_prefix = 0, True
            for end in range(_BLOCK_WORDS, len(words) + 1, _BLOCK_WORDS):
                block_hash = hash((block_hash, *words[end - _BLOCK_WORDS : end]))
                is_prefix = is_prefix and block_hash in self.seen_blocks
                cached_words += _BLOCK_WORDS if is_prefix else 0
                self.seen_blocks.add(block_hash)
        cached = min(round(cached_words * self.script.tokens_per_word), num_tokens)
        self.prompt_tokens += num_tokens
        self.cached_tokens += cached
        return num_tokens, cached
