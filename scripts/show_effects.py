#!/usr/bin/env python3
"""Show on the demo model what each technique of a serving engine is for, with and without it, in under four minutes.

    chunked prefill       the longest pause of running streams while a prompt of 6,000 tokens arrives
    paged KV cache        the share of the cache that holds nothing (scripts/kv_waste.py, no model)
    continuous batching   throughput, against batches that all wait for their longest member
    batching at all       tokens/s of 4 requests together against 1: the weights are read once for all
    prefix caching        TTFT behind a system prompt of 2,048 tokens, new and known
    enough KV cache       throughput and TTFT where requests are preempted, against a cache that holds them all

Each row is measured here and now over HTTP, so both sides of a row ran on the same machine in the same minute. Needs
httpx. --markdown prints the table as the README shows it.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

import httpx
import kv_waste
from server_under_test import ServerUnderTest, total

BAR = 30
SYSTEM_TOKENS = 2048
LONG_TOKENS = 6000


@dataclass
class Answer:
    """When each delivery of one stream came, from its sending on, in seconds."""

    times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Pauses between deliveries."""
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


@dataclass(frozen=True)
class Effect:
    """One row: the same figure without and with; `plot` are lines to print below."""

    name: str
    figure: str
    without: str
    with_it: str
    gain: str
    plot: tuple[str, ...]


def tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(1000, 20_000) for _ in range(count)]


async def ask(client: httpx.AsyncClient, prompt: list[int], num_tokens: int) -> Answer:
    """One streamed completion of exactly `num_tokens`."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    answer, sent_s = Answer(), time.perf_counter()
    body |= {"stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                sys.exit(f"show_effects: {event['error']['message']}")
            if event["choices"]:
                answer.times_s.append(time.perf_counter() - sent_s)
            elif event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
    return answer


def connect(server: ServerUnderTest) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=180, trust_env=False)


def bars(*rows: tuple[str, float], unit: str) -> tuple[str, ...]:
    """A bar per value, the longest BAR wide."""
    most = max(value for _, value in rows) or 1
    return tuple(
        f"{name:<22} {'█' * max(1, round(value / most * BAR)):<{BAR}} {value:,.4g} {unit}" for name, value in rows
    )


def spark(values: list[float], most: float, width: int = 60) -> str:
    """The largest value of each of `width` pieces, as one line of blocks."""
    levels = " ▁▂▃▄▅▆▇█"
    pieces = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(min(width, len(values)))]
    return "".join(levels[min(8, round(max(piece, default=0) / most * 8))] for piece in pieces)


# ---- the effects ----


async def gaps_around_a_long_prompt(server: ServerUnderTest) -> list[float]:
    """Gaps of four running streams, in order of time, while the long prompt arrives."""
    dice = random.Random(1)
    async with connect(server) as client:
        streams = [asyncio.create_task(ask(client, tokens(dice, 32), 120)) for _ in range(4)]
        await asyncio.sleep(1.0)
        await ask(client, tokens(dice, LONG_TOKENS), 1)
        answers = await asyncio.gather(*streams)
    timed = [(at, gap) for a in answers for at, gap in zip(a.times_s[1:], a.gaps_s, strict=True)]
    return [gap for _, gap in sorted(timed)]


async def together(server: ServerUnderTest, prompts: list[list[int]], lengths: list[int], at_once: int) -> float:
    """Seconds for all, at most `at_once` of them in the server, each replaced when it ends."""
    gate = asyncio.Semaphore(at_once)
    async with connect(server) as client:

        async def one(prompt: list[int], length: int) -> None:
            async with gate:
                await ask(client, prompt, length)

        started_s = time.perf_counter()
        await asyncio.gather(*(one(p, n) for p, n in zip(prompts, lengths, strict=True)))
        return time.perf_counter() - started_s


async def continuous_batching(server: ServerUnderTest) -> Effect:
    dice = random.Random(2)
    lengths = [min(160, round(dice.lognormvariate(3.2, 0.9)) + 4) for _ in range(32)]
    times, steps = {False: math.inf, True: math.inf}, {False: 0.0, True: 0.0}
    for is_continuous in (False, True) * 2:  # the better of two: others may use the machine
        prompts = [tokens(dice, 48) for _ in lengths]
        size = len(lengths) if is_continuous else 8
        batches = [slice(start, start + size) for start in range(0, len(lengths), size)]
        before = total(server.page(), "kvctl:step_duration_seconds_count")
        seconds = sum([await together(server, prompts[b], lengths[b], 8) for b in batches])
        times[is_continuous] = min(times[is_continuous], seconds)
        steps[is_continuous] = total(server.page(), "kvctl:step_duration_seconds_count") - before
    static, continuous = (sum(lengths) / times[kind] for kind in (False, True))
    return Effect(
        "continuous batching",
        f"output tokens/s, {len(lengths)} requests, 8 at once",
        f"{static:.0f}",
        f"{continuous:.0f}",
        f"{continuous / static:.1f}x",
        (
            *bars(("static batches", static), ("continuous", continuous), unit="tokens/s"),
            *bars(("static batches", steps[False]), ("continuous", steps[True]), unit="steps of the model"),
        ),
    )


async def shared_weight_reads(server: ServerUnderTest) -> Effect:
    dice = random.Random(3)
    rates = {}
    async with connect(server) as client:
        for number in (1, 4):
            best = 0.0
            for _ in range(2):
                answers = await asyncio.gather(*(ask(client, tokens(dice, 16), 64) for _ in range(number)))
                spans = [answer.times_s[-1] - answer.ttft_s for answer in answers]
                best = max(best, sum(answer.num_tokens - 1 for answer in answers) / max(spans))
            rates[number] = best
    return Effect(
        "batching: weights read once for all",
        "output tokens/s, 1 against 4 requests",
        f"{rates[1]:.0f}",
        f"{rates[4]:.0f}",
        f"{rates[4] / rates[1]:.1f}x",
        bars(("1 request", rates[1]), ("4 requests", rates[4]), unit="tokens/s"),
    )


async def prefix_caching(server: ServerUnderTest) -> Effect:
    dice = random.Random(4)
    system = tokens(dice, SYSTEM_TOKENS)
    async with connect(server) as client:
        new = [(await ask(client, tokens(dice, SYSTEM_TOKENS + 24), 2)).ttft_s for _ in range(3)]
        await ask(client, system + tokens(dice, 24), 2)
        known = [(await ask(client, system + tokens(dice, 24), 2)).ttft_s for _ in range(3)]
    before, after = statistics.median(new) * 1e3, statistics.median(known) * 1e3
    return Effect(
        "prefix caching",
        f"TTFT, system prompt of {SYSTEM_TOKENS:,} tokens",
        f"{before:,.0f} ms",
        f"{after:,.0f} ms",
        f"{before / after:.1f}x",
        bars(("new prefix", before), ("cached prefix", after), unit="ms"),
    )


async def burst(server: ServerUnderTest) -> tuple[float, float, float, float]:
    """Eight requests of 64 + 96 tokens at once: output tokens/s, median TTFT, preemptions, recomputed tokens."""
    dice = random.Random(5)
    prompts = [tokens(dice, 64) for _ in range(8)]
    before = server.page()
    async with connect(server) as client:
        started_s = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, prompt, 96) for prompt in prompts))
        seconds = time.perf_counter() - started_s
    after = server.page()
    changes = [
        total(after, name) - total(before, name)
        for name in ("vllm:num_preemptions_total", "kvctl:recomputed_tokens_total")
    ]
    rate = sum(answer.num_tokens for answer in answers) / seconds
    return rate, statistics.median(answer.ttft_s for answer in answers) * 1e3, *changes


def chunked_prefill(whole: list[float], chunked: list[float]) -> Effect:
    most = max(whole + chunked)
    return Effect(
        "chunked prefill",
        f"longest pause of a stream while {LONG_TOKENS:,} tokens arrive",
        f"{max(whole) * 1e3:,.0f} ms",
        f"{max(chunked) * 1e3:,.0f} ms",
        f"{max(whole) / max(chunked):.1f}x",
        (
            f"gaps between tokens, over time; full height = {most * 1e3:,.0f} ms",
            f"whole   {spark(whole, most)}",
            f"chunked {spark(chunked, most)}",
        ),
    )


def paged_cache() -> Effect:
    ways = kv_waste.measure(600, 0)
    rows = [(name, waste.wasted * 100) for name, waste in ways.items()]
    parts = [
        f"{name:<26} reserved {w.reserved:5.1%}  internal {w.internal:5.1%}  external {w.external:5.1%}"
        for name, w in ways.items()
    ]
    return Effect(
        "paged KV cache",
        "share of the cache that holds nothing",
        f"{rows[0][1]:.0f} %",
        f"{rows[-1][1]:.1f} %",
        f"{ways['contiguous, whole length'].running:.0f} -> {list(ways.values())[-1].running:.0f} requests in it",
        (*bars(*((name.replace("contiguous, ", ""), value) for name, value in rows), unit="% wasted"), *parts),
    )


def preemption(small: tuple[float, ...], ample: tuple[float, ...]) -> Effect:
    return Effect(
        "enough KV cache: no preemption",
        "output tokens/s, 8 requests at once",
        f"{small[0]:.0f}",
        f"{ample[0]:.0f}",
        f"{ample[0] / small[0]:.1f}x",
        (
            *bars((f"{small[2]:.0f} preemptions", small[0]), ("none", ample[0]), unit="tokens/s"),
            *bars((f"{small[2]:.0f} preemptions", small[1]), ("none", ample[1]), unit="ms TTFT p50"),
            f"{small[3]:,.0f} tokens were computed twice",
        ),
    )


def measure(threads: list[str]) -> list[Effect]:
    """Run all; three servers in turn."""
    effects = []

    def note(text: str) -> None:
        print(f"... {text}", file=sys.stderr, flush=True)

    note("paged KV cache")
    waste = paged_cache()
    note("server with chunked prefill")
    with ServerUnderTest("--max-num-batched-tokens", "256", "--max-num-seqs", "16", *threads) as server:
        asyncio.run(shared_weight_reads(server))  # warm
        chunked = asyncio.run(gaps_around_a_long_prompt(server))
    note("server without chunked prefill")
    flags = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192", "--max-num-seqs", "16")
    with ServerUnderTest(*flags, *threads) as server:
        effects.append(chunked_prefill(asyncio.run(gaps_around_a_long_prompt(server)), chunked))
        effects.append(waste)
        note("batching")
        effects.append(asyncio.run(continuous_batching(server)))
        effects.append(asyncio.run(shared_weight_reads(server)))
        note("prefix caching")
        effects.append(asyncio.run(prefix_caching(server)))
        ample = asyncio.run(burst(server))
    note("server with a small KV cache")
    with ServerUnderTest("--num-gpu-blocks-override", "48", "--max-model-len", "512", *threads) as server:
        asyncio.run(shared_weight_reads(server))  # warm
        effects.append(preemption(asyncio.run(burst(server)), ample))
    return effects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", help="for kvctl serve")
    parser.add_argument("--markdown", action="store_true", help="the table alone, as in the README")
    options = parser.parse_args()
    started_s = time.monotonic()
    effects = measure(["--threads", options.threads] if options.threads else [])
    if options.markdown:
        print("| technique | figure | without | with | gain |\n| --- | --- | ---: | ---: | ---: |")
        for e in effects:
            print(f"| {e.name} | {e.figure} | {e.without} | {e.with_it} | {e.gain} |")
        return 0
    for effect in effects:
        print(f"\n{effect.name}\n  {effect.figure}: {effect.without} without, {effect.with_it} with ({effect.gain})")
        for line in effect.plot:
            print(f"    {line}")
    print(f"\n{time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
