#!/usr/bin/env python3
"""How much of a KV cache is wasted: paged blocks against one contiguous piece per request, on the same requests.

The requests are a seeded mix as chats have it (log-normal prompts and answers), more than fit at a time. Contiguous
allocation does not know how long an answer will be: it reserves the model's whole length, or the next power of two of
what is needed so far (and moves up by copying). Paged allocation is kvctl's own scheduler, block pool and KV manager,
with a model that answers at once.

Each share is of the whole cache, averaged over the steps in which requests wait for room:
  tokens    holds keys and values
  reserved  will hold some, later, of the request that has it
  internal  will never hold any: behind the end of its request
  external  free, and yet the next request in the queue does not fit
Source of the four words: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023, 3.1.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvctl.core.block_pool import BlockPool
from kvctl.core.config import CacheConfig, SchedulerConfig
from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.core.kv_cache_manager import KVCacheManager
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.scheduler import Scheduler
from kvctl.core.step import ModelRunnerOutput

BLOCK_SIZE = 16
NUM_BLOCKS = 2048
MAX_MODEL_LEN = 2048
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE  # a slot holds one token
MAX_RUNNING = 256


@dataclass(frozen=True)
class Job:
    """A request: tokens of its prompt, and of the answer that nobody knows before."""

    prompt: int
    output: int


@dataclass
class Waste:
    """Shares of the cache, 0 to 1, and the mean number of requests in it."""

    tokens: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    external: float = 0.0
    running: float = 0.0
    steps: int = 0

    def add(self, tokens: int, reserved: int, internal: int, running: int, free: int) -> None:
        """Count one step, in slots."""
        self.tokens += tokens / NUM_SLOTS
        self.reserved += reserved / NUM_SLOTS
        self.internal += internal / NUM_SLOTS
        self.external += free / NUM_SLOTS
        self.running += running
        self.steps += 1

    def mean(self) -> "Waste":
        """Averages over the steps."""
        names = ("tokens", "reserved", "internal", "external", "running")
        return Waste(*(getattr(self, name) / max(1, self.steps) for name in names), steps=self.steps)

    @property
    def wasted(self) -> float:
        """Share that holds nothing."""
        return 1 - self.tokens


def make_jobs(count: int, seed: int) -> list[Job]:
    """Prompts of 160 tokens in the median, answers of 200, both with a long tail."""
    dice = random.Random(seed)

    def length(median: float, spread: float) -> int:
        return max(1, min(MAX_MODEL_LEN // 2 - 1, round(dice.lognormvariate(0, spread) * median)))

    return [Job(length(160, 0.9), length(200, 0.8)) for _ in range(count)]


def contiguous(jobs: list[Job], *, whole_length: bool) -> Waste:
    """First fit in one array of slots."""
    waste, waiting = Waste(), list(reversed(jobs))
    held: dict[int, tuple[int, int, Job, int]] = {}  # key -> (start, size, job, tokens so far)
    key = 0

    def size_for(tokens: int) -> int:
        return MAX_MODEL_LEN if whole_length else 1 << (tokens - 1).bit_length()

    def find(size: int) -> int | None:
        end = 0
        for start, taken, _, _ in sorted(held.values(), key=lambda piece: piece[0]):
            if start - end >= size:
                return end
            end = start + taken
        return end if NUM_SLOTS - end >= size else None

    while waiting:
        while waiting and len(held) < MAX_RUNNING:
            size = size_for(waiting[-1].prompt + 1)
            start = find(size)
            if start is None:
                break
            job = waiting.pop()
            held[key], key = (start, size, job, job.prompt), key + 1
        if waiting:
            tokens = sum(piece[3] for piece in held.values())
            size_all = sum(piece[1] for piece in held.values())
            reserved = sum(min(p[1], p[2].prompt + p[2].output) - p[3] for p in held.values())
            waste.add(tokens, reserved, size_all - tokens - reserved, len(held), NUM_SLOTS - size_all)
        for name, (start, size, job, tokens) in list(held.items()):
            if tokens + 1 >= job.prompt + job.output:
                del held[name]
            elif tokens + 1 <= size:
                held[name] = (start, size, job, tokens + 1)
            else:
                del held[name]
                larger = find(size_for(tokens + 1))
                if larger is None:  # no hole for the larger piece: starts again later
                    waiting.append(job)
                else:
                    held[name] = (larger, size_for(tokens + 1), job, tokens + 1)
    return waste.mean()


def paged(jobs: list[Job]) -> Waste:
    """The real scheduler over the real pool."""
    pool = BlockPool(NUM_BLOCKS + 1)  # block 0 is the null block
    manager = KVCacheManager(pool, CacheConfig(block_size=BLOCK_SIZE), [KVCacheGroup((0,))])
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_RUNNING, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, manager)
    token_ids: Iterator[int] = iter(random.Random(1).choices(range(1 << 16), k=sum(job.prompt for job in jobs)))
    for number, job in enumerate(jobs):
        prompt = [next(token_ids) for _ in range(job.prompt)]
        scheduler.add(Request(str(number), prompt, SamplingParams(max_tokens=job.output, temperature=0)))
    waste = Waste()
    while scheduler.waiting:
        plan = scheduler.schedule()
        if scheduler.waiting:
            used = (pool.num_usable_blocks - pool.num_free_blocks) * BLOCK_SIZE
            tokens = sum(r.num_computed_tokens for r in scheduler.running)
            waste.add(tokens, 0, used - tokens, len(scheduler.running), NUM_SLOTS - used)
        made = [scheduler.requests[name] for name in plan.request_ids]
        scheduler.update(plan, ModelRunnerOutput([7 if r.num_computed_tokens == r.num_tokens else None for r in made]))
    return waste.mean()


def measure(count: int, seed: int) -> dict[str, Waste]:
    """All three ways."""
    jobs = make_jobs(count, seed)
    return {
        "contiguous, whole length": contiguous(jobs, whole_length=True),
        "contiguous, powers of two": contiguous(jobs, whole_length=False),
        f"paged, blocks of {BLOCK_SIZE}": paged(jobs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = ("tokens", "reserved", "internal", "external")
    print(f"{options.requests} requests, {NUM_SLOTS:,} slots, model length {MAX_MODEL_LEN:,}")
    print(f"{'':<28}" + "".join(f"{name:>10}" for name in names) + f"{'requests in it':>16}")
    for way, waste in measure(options.requests, options.seed).items():
        print(f"{way:<28}" + "".join(f"{getattr(waste, n):>10.1%}" for n in names) + f"{waste.running:>16.1f}")


if __name__ == "__main__":
    main()
