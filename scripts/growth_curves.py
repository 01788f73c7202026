#!/usr/bin/env python3
"""Print how cost grows: with running and waiting requests, context, prompt and cache size; and what a token costs.

Two parts. The core alone, without a model: `schedule()` + `update()` per step. Then the demo model over HTTP: time per
token, TTFT, memory, CPU time of the API process per streamed token, the scheduler's share of a step. Each curve has
the exponent p of cost ~ work^p between its ends and the most it may be: above that, the cost grows faster than its
work, and the exit code is 1. Run it on an idle machine. Needs httpx.
"""

import argparse
import asyncio
import gc
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import bench_scheduler
import httpx
from server_under_test import ServerUnderTest, total
from show_effects import ask, connect, tokens

BAR = 32
WARM_WAITING = 100
NOISE = 0.15  # of an exponent
MAX_API_US = 60.0  # CPU per streamed token at 64 streams
MAX_SCHEDULER_SHARE = 0.05


@dataclass(frozen=True)
class Curve:
    """Cost over work; `most` is the largest exponent that is no defect."""

    title: str
    unit: str
    points: Sequence[tuple[int, float]]
    most: float

    @property
    def exponent(self) -> float:
        """p of cost ~ work^p, between the ends."""
        (x0, y0), (x1, y1) = self.points[0], self.points[-1]
        return math.log(y1 / y0) / math.log(x1 / x0)

    @property
    def holds(self) -> bool:
        """Whether it grows no faster than allowed."""
        return self.exponent <= self.most + NOISE

    def show(self) -> None:
        """Print it."""
        verdict = "ok" if self.holds else "GROWS TOO FAST"
        print(f"\n{self.title}: cost ~ work^{self.exponent:.2f} (at most {self.most:g}): {verdict}")
        top = max(cost for _, cost in self.points)
        for work, cost in self.points:
            print(f"  {work:>9,} {'█' * max(1, round(cost / top * BAR)):<{BAR}} {cost:10.3f} {self.unit}")


def core_curves(quick: bool) -> list[Curve]:
    """The scheduler and the block pool."""
    steps = 64 if quick else 200

    def median(running: int, prompt: int = 256, waiting: int = 0, blocks: int | None = None) -> float:
        needed = running * (prompt // bench_scheduler.BLOCK_SIZE + 40)
        times = bench_scheduler.measure(running, prompt, waiting, blocks or needed, steps)
        gc.collect()
        return statistics.median(times)

    waiting = (10, 100, 1_000) if quick else (10, 100, 1_000, 10_000)
    blocks = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000)
    return [
        Curve("core step, running requests", "ms", [(n, median(n)) for n in (16, 64, 256, 1024)], 1),
        Curve("core step, context of 64 requests", "ms", [(n, median(64, n)) for n in (128, 1024, 8192)], 0),
        Curve("core step, waiting requests", "ms", [(n, median(64, waiting=n, blocks=64 * 64)) for n in waiting], 0),
        Curve("core step, KV blocks in the pool", "ms", [(n, median(64, blocks=n)) for n in blocks], 0),
    ]


async def gap_ms(client: httpx.AsyncClient, running: int, prompt: int, output: int) -> float:
    """Median time per token of `running` requests at once, all of them decoding."""
    dice = random.Random(running * 100_000 + prompt)
    answers = await asyncio.gather(*(ask(client, tokens(dice, prompt), output) for _ in range(running)))
    started_s = max(answer.ttft_s for answer in answers)
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.times_s, answer.times_s[1:], strict=False)
        if earlier >= started_s
    ]
    return statistics.median(gaps) * 1e3


async def model_curves(server: ServerUnderTest, quick: bool) -> list[Curve]:
    """Steps of the demo model, seen by a client."""
    output = 24 if quick else 48
    async with connect(server) as client:
        await gap_ms(client, 4, 32, 16)  # warm
        running = [(n, await gap_ms(client, n, 32, output)) for n in (1, 4, 16, 64)]
        context = [(n, await gap_ms(client, 1, n, output)) for n in (256, 1024, 4096)]
        dice = random.Random(9)
        ttft = []
        for length in (256, 1024, 4096):
            answers = [await ask(client, tokens(dice, length), 1) for _ in range(2)]
            ttft.append((length, min(answer.ttft_s for answer in answers) * 1e3))
    return [
        Curve("time per token, running requests", "ms", running, 1),
        Curve("time per token, context", "ms", context, 1),
        Curve("TTFT, tokens of the prompt", "ms", ttft, 1.3),  # attention grows with the square, the rest does not
    ]


async def waiting_memory(server: ServerUnderTest, counts: Sequence[int]) -> list[tuple[int, float]]:
    """MiB that both processes grow by while so many requests of 256 tokens wait; counts must rise."""
    dice = random.Random(7)
    body = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_connections=None)
    points: list[tuple[int, float]] = []
    tasks: list[asyncio.Task[httpx.Response]] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits, trust_env=False) as client:
        start = 0.0
        for count in (WARM_WAITING, *(WARM_WAITING + count for count in counts)):
            while len(tasks) < count:
                sent = client.post("/v1/completions", json={**body, "prompt": tokens(dice, 256)})
                tasks.append(asyncio.create_task(sent))
            while total(await asyncio.to_thread(server.page), "kvctl:requests_accepted_total") < count:
                await asyncio.sleep(0.2)
            now = sum(value for name, value in server.resources().items() if "rss" in name) / (1 << 20)
            if count == WARM_WAITING:
                start = now
            else:
                points.append((count - WARM_WAITING, max(0.1, now - start)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return points


async def token_cost(server: ServerUnderTest, streams: int, output: int) -> tuple[float, float]:
    """(CPU us of the API process per streamed token, scheduler's share of the steps' time)."""
    dice = random.Random(8)
    names = ("kvctl:schedule_duration_seconds_sum", "kvctl:step_duration_seconds_sum", "vllm:generation_tokens_total")
    async with connect(server) as client:
        before, cpu_s = server.page(), server.cpu_s(server.process.pid)
        await asyncio.gather(*(ask(client, tokens(dice, 16), output) for _ in range(streams)))
        cpu_s = server.cpu_s(server.process.pid) - cpu_s
        after = server.page()
    schedule_s, step_s, made = (total(after, name) - total(before, name) for name in names)
    return cpu_s / made * 1e6, schedule_s / step_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter points")
    options = parser.parse_args()
    curves = core_curves(options.quick)
    for curve in curves:
        curve.show()
    with ServerUnderTest("--max-num-seqs", "64", "--disable-uvicorn-access-log") as server:
        more = asyncio.run(model_curves(server, options.quick))
        api_us, share = asyncio.run(token_cost(server, 64, 64 if options.quick else 256))
    with ServerUnderTest("--max-num-seqs", "4", "--disable-uvicorn-access-log") as server:
        memory = asyncio.run(waiting_memory(server, (200, 1000) if options.quick else (200, 1000, 4000)))
        more.append(Curve("memory of both processes, waiting requests of 256 tokens", "MiB", memory, 1))
    for curve in more:
        curve.show()
    is_fit = api_us <= MAX_API_US and share <= MAX_SCHEDULER_SHARE
    print(f"\nAPI process: {api_us:.0f} us of CPU per streamed token at 64 streams (at most {MAX_API_US:g})")
    print(
        f"scheduler and KV manager: {share:.2%} of the steps' time at 64 requests (at most {MAX_SCHEDULER_SHARE:.0%})"
    )
    return 0 if is_fit and all(curve.holds for curve in (*curves, *more)) else 1


if __name__ == "__main__":
    sys.exit(main())
