#!/usr/bin/env python3
"""Print what `schedule()` + `update()` cost per step with every request decoding, and how the cost grows.

256-token prompts, no preemption, block size 16: the load under which vLLM 0.33's own scheduler was measured at
0.51 / 2.1 / 9.2 ms for 64 / 256 / 1,024 running requests on this kind of machine. Also: context length, waiting
requests and prefix-cache size, none of which may matter.
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
    if args.json:
        json.dump(rows, sys.stdout, indent=2)
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
    Console().print(table)


if __name__ == "__main__":
    main()
