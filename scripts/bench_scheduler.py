#!/usr/bin/env python3
"""Print what `schedule()` + `update()` cost per step with every request decoding, and how the cost grows.

256-token prompts, no preemption, block size 16: the load under which vLLM 0.33's own scheduler was measured at
0.51 / 2.1 / 9.2 ms for 64 / 256 / 1,024 running requests on this kind of machine. Also: context length, waiting
requests and prefix-cache size, none of which may matter. Then what a new prompt costs when every block it takes evicts
other content, twice round the pool, and what a long cached prompt costs that waits for blocks.
"""

import argparse
import gc
import json
import statistics
import sys
import time

from rich import box
from rich.console import Console
from rich.table import Table

from kvctl.core.block_pool import BlockPool
from kvctl.core.config import CacheConfig, SchedulerConfig
from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.core.kv_cache_manager import KVCacheManager
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.scheduler import Scheduler
from kvctl.core.step import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16
VLLM_MS = {64: 0.51, 256: 2.1, 1024: 9.2}


def sampled(plan: SchedulerOutput, scheduler: Scheduler) -> ModelRunnerOutput:
    tokens: list[int | None] = []
    for request_id in plan.request_ids:
        request = scheduler.requests[request_id]
        tokens.append(7 if request.num_computed_tokens == request.num_tokens else None)
    return ModelRunnerOutput(tokens)


def measure(num_running: int, prompt_tokens: int, num_waiting: int, num_blocks: int, steps: int) -> list[float]:
    """Milliseconds of each decode step."""
    pool = BlockPool(num_blocks)
    manager = KVCacheManager(pool, CacheConfig(block_size=BLOCK_SIZE), [KVCacheGroup((0,))])
    config = SchedulerConfig(
        max_model_len=1 << 20, max_num_seqs=num_running, max_num_batched_tokens=max(8192, num_running)
    )
    scheduler = Scheduler(config, manager)
    params = SamplingParams(max_tokens=1 << 19, temperature=0)
    for index in range(num_running + num_waiting):
        length = prompt_tokens + (index % BLOCK_SIZE if index < num_running else 0)
        scheduler.add(Request(str(index), [index * 31 + i & 0xFFFF for i in range(length)], params))
    while len(scheduler.running) < num_running or any(r.num_output_tokens == 0 for r in scheduler.running):
        plan = scheduler.schedule()
        scheduler.update(plan, sampled(plan, scheduler))
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        result = ModelRunnerOutput([7] * len(plan.request_ids))
        resumed = time.perf_counter()
        outputs = scheduler.update(plan, result)
        times.append((time.perf_counter() - resumed + middle - started) * 1e3)
        assert len(outputs) == num_running
    gc.unfreeze()
    return times


def measure_evictions(num_blocks: int, prompt_tokens: int, prompts: int) -> list[float]:
    """Milliseconds to schedule each of `prompts` new prompts in a pool full of cached content."""
    pool = BlockPool(num_blocks)
    for round_number in range(2):  # the second round evicts all of the first: what is remembered of it is full too
        blocks = pool.allocate(pool.num_free_blocks)
        for block in blocks:
            pool.register(block, b"%d/%d" % (round_number, block.block_id))
        pool.free(reversed(blocks))
    manager = KVCacheManager(pool, CacheConfig(block_size=BLOCK_SIZE), [KVCacheGroup((0,))])
    config = SchedulerConfig(max_model_len=1 << 20, max_num_seqs=1, max_num_batched_tokens=prompt_tokens)
    scheduler = Scheduler(config, manager)
    times = []
    for number in range(prompts):
        tokens = [number * prompt_tokens + i for i in range(prompt_tokens)]
        scheduler.add(Request(str(number), tokens, SamplingParams(max_tokens=1, temperature=0)))
        started = time.perf_counter()
        plan = scheduler.schedule()
        times.append((time.perf_counter() - started) * 1e3)
        scheduler.update(plan, sampled(plan, scheduler))
    return times


def measure_blocked(cached_tokens: int, steps: int) -> list[float]:
    """Milliseconds of each schedule() of one decoding request while a prompt that shares its prefix lacks blocks."""
    num_cached, free = cached_tokens // BLOCK_SIZE, 400
    manager = KVCacheManager(BlockPool(2 * num_cached + 1000), CacheConfig(block_size=BLOCK_SIZE), [KVCacheGroup((0,))])
    config = SchedulerConfig(max_model_len=1 << 20, max_num_seqs=2, max_num_batched_tokens=1 << 20)
    scheduler = Scheduler(config, manager)
    params = SamplingParams(max_tokens=1 << 19, temperature=0)
    document = list(range(cached_tokens))
    scheduler.add(Request("running", [*document, 1], params))
    plan = scheduler.schedule()
    scheduler.update(plan, sampled(plan, scheduler))
    manager.pool.allocate(manager.pool.num_free_blocks - free)
    scheduler.add(Request("blocked", [*document, *range(BLOCK_SIZE * (free + 1))], params))
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.schedule()
        times.append((time.perf_counter() - started) * 1e3)
        scheduler.update(plan, ModelRunnerOutput([7]))
    assert scheduler.waiting
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = [(n, 256, 0, n * 64 + 10) for n in (1, 16, 64, 256, 1024)]
    cases += [(64, length, 0, 64 * (length // BLOCK_SIZE + 40)) for length in (16, 4096, 32768)]
    cases += [(64, 256, waiting, 64 * 64) for waiting in (10, 1_000, 10_000)]
    cases += [(64, 256, 0, blocks) for blocks in (100_000, 1_000_000)]
    rows = []
    for running, prompt, waiting, blocks in cases:
        times = measure(running, prompt, waiting, blocks, args.steps)
        rows.append(
            {
                "running": running,
                "prompt_tokens": prompt,
                "waiting": waiting,
                "num_blocks": blocks,
                "mean_ms": statistics.fmean(times),
                "median_ms": statistics.median(times),
                "p99_ms": sorted(times)[int(len(times) * 0.99)],
                "vllm_ms": VLLM_MS.get(running) if (prompt, waiting) == (256, 0) and blocks < 100_000 else None,
            }
        )
    evictions = {
        blocks: statistics.median(measure_evictions(blocks, 8192, 20)) for blocks in (10_000, 100_000, 1_000_000)
    }
    blocked = {tokens: statistics.median(measure_blocked(tokens, args.steps)) for tokens in (1_600, 16_000, 160_000)}
    if args.json:
        json.dump({"decoding": rows, "evicting_ms": evictions, "blocked_ms": blocked}, sys.stdout, indent=2)
        print()
        return
    table = Table(
        title="schedule() + update() per step, all requests decoding (ms)", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    for column in ("running", "prompt", "waiting", "blocks", "median", "mean", "p99", "us/req", "vLLM", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        vllm = row["vllm_ms"]
        table.add_row(
            f"{row['running']:,}",
            f"{row['prompt_tokens']:,}",
            f"{row['waiting']:,}",
            f"{row['num_blocks']:,}",
            f"{row['median_ms']:.3f}",
            f"{row['mean_ms']:.3f}",
            f"{row['p99_ms']:.3f}",
            f"{row['mean_ms'] / row['running'] * 1e3:.2f}",
            f"{vllm:.2f}" if vllm else "-",
            f"{row['mean_ms'] / vllm:.2f}" if vllm else "-",
        )
    console = Console()
    console.print(table)
    for blocks, median_ms in evictions.items():
        console.print(f"a new prompt of 8,192 tokens in {blocks:,} cached blocks: {median_ms:.2f} ms", highlight=False)
    for tokens, median_ms in blocked.items():
        console.print(f"a step while a prompt with {tokens:,} cached tokens waits: {median_ms:.3f} ms", highlight=False)


if __name__ == "__main__":
    main()
