#!/usr/bin/env python3
"""Load a server with everything at once for a long time, and prove that nothing is lost, wrong or left behind.

Starts `kvctl serve` (demo model, float32, a KV cache so small that requests preempt each other) and sends in rounds:
streams and whole answers, n > 1, long and short prompts, shared prefixes, stop strings, priorities, logprobs, clients
that leave, read slowly or never read, half requests, bad requests. Between rounds the server is idle and is looked at.

What must hold, or the exit code is 1:
- every accepted request ends exactly once, with the right number of tokens; greedy and seeded ones with the very text
  they had alone (float32: nothing in a batch may change them); bad ones get their status;
- idle means idle: no request, no held block; /metrics adds up: accepted = ended, prompt tokens = computed + cached,
  and what clients saw is what the server counted;
- memory, open files, threads and the number of metric series stay flat.

Needs httpx. Bounded: no request may take longer than --request-timeout.
"""

import argparse
import asyncio
import random
import sys
import time

import httpx
from server_under_test import Page, ServerUnderTest, total
from soak_clients import Clients
from soak_oracle import ENDS, MIN_ROUNDS, Tally, check_flat, check_page, make_cases

IDLE_TIMEOUT_S = 20
MAX_VIOLATIONS = 20  # more say nothing new


async def work(clients: Clients, tally: Tally, dice: random.Random, until_s: float, timeout_s: float) -> None:
    """One client after another, of kinds by chance, until the time is over."""
    while time.monotonic() < until_s and len(tally.violations) < MAX_VIOLATIONS:
        name, kind = dice.choice(clients.kinds)
        tally.kinds[name] += 1
        try:
            async with asyncio.timeout(timeout_s):
                await kind()
        except TimeoutError:
            tally.violate(f"{name} took longer than {timeout_s:g} s")
        except (httpx.HTTPError, OSError) as error:
            if name not in clients.may_lose_their_connection:
                tally.violate(f"{name}: {type(error).__name__}: {error}")


async def wait_idle(server: ServerUnderTest, tally: Tally) -> Page:
    """Wait for the server to have nothing; the page then."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        page = await asyncio.to_thread(server.page)
        in_flight = httpx.get(f"{server.url}/health", trust_env=False).json()["in_flight"]
        busy = {name: total(page, name) for name in names} | {"in_flight": in_flight}
        if not any(busy.values()):
            return page
        if time.monotonic() > deadline_s:
            tally.violate(f"not idle after {IDLE_TIMEOUT_S} s without requests: {busy}")
            return page
        await asyncio.sleep(0.1)


def report(tally: Tally, samples: list[dict[str, float]], page: Page, seconds: float) -> None:
    """Print what was done and how the idle server's resources went."""
    ended = sum(value for (name, _), value in page.items() if name == ENDS)
    print(f"\n{sum(tally.kinds.values()):,} clients in {seconds / 60:.1f} minutes: ", end="")
    print(", ".join(f"{count:,} {name}" for name, count in sorted(tally.kinds.items())))
    print(
        f"{ended:,.0f} completions ended: "
        + ", ".join(f"{total(page, ENDS, finished_reason=r):,.0f} {r}" for r in ("stop", "length", "abort", "error"))
    )
    print(
        f"{total(page, 'vllm:prompt_tokens_total'):,.0f} prompt tokens, of them "
        f"{total(page, 'vllm:prompt_tokens_cached_total'):,.0f} cached; "
        f"{total(page, 'vllm:generation_tokens_total'):,.0f} generated; "
        f"{total(page, 'vllm:num_preemptions_total'):,.0f} preemptions"
    )
    print(f"{'idle server':<18}{'first':>14}{'once warm':>14}{'last':>14}")
    for name in samples[0] if samples else ():
        unit = 1 << 20 if name.endswith("_bytes") else 1
        values = [samples[0][name], samples[min(1, len(samples) - 1)][name], samples[-1][name]]
        label = name.replace("_bytes", " MiB")
        print(f"{label:<18}" + "".join(f"{value / unit:>14,.0f}" for value in values))
    print(f"{len(tally.violations)} violations")


async def run(options: argparse.Namespace, server: ServerUnderTest) -> int:
    """The whole soak; the exit code."""
    dice, tally = random.Random(options.seed), Tally()
    timeout_s = options.request_timeout
    clients = Clients(server.url, server.model, tally, dice, at_once=options.clients, timeout_s=timeout_s)
    begun_s = time.monotonic()
    await clients.run_alone(make_cases(dice, server.model, options.cases))
    started_s = time.monotonic()
    until_s = started_s + options.minutes * 60
    round_s = max(5.0, min(60.0, options.minutes * 60 / 8))
    print(f"{options.cases} answers known after {started_s - begun_s:.0f} s; rounds of {round_s:.0f} s", flush=True)
    samples: list[dict[str, float]] = []
    page = await wait_idle(server, tally)
    while len(tally.violations) < MAX_VIOLATIONS:
        if len(samples) >= MIN_ROUNDS and time.monotonic() + round_s / 2 > until_s:
            break  # on a busy machine rounds take longer than they should: as many as are needed all the same
        round_end_s = time.monotonic() + round_s
        await asyncio.gather(*(work(clients, tally, dice, round_end_s, timeout_s) for _ in range(options.clients)))
        await clients.drop_connections()  # so that they are gone when the server is looked at
        page = await wait_idle(server, tally)
        check_page(tally, page)
        series = sum(not name.startswith(("process_", "python_")) for name, _ in page)
        now = {**server.resources(), "metric series": series}
        samples.append(now)
        print(
            f"round {len(samples)}: {sum(tally.kinds.values()):,} clients, "
            f"{total(page, 'vllm:num_preemptions_total'):,.0f} preemptions, API {now['api rss_bytes'] >> 20} MiB, "
            f"engine {now['engine rss_bytes'] >> 20} MiB, {len(tally.violations)} violations",
            flush=True,
        )
    await clients.aclose()
    check_flat(tally, samples)
    if total(page, "vllm:num_preemptions_total") == 0:
        tally.violate("no preemption happened: the KV cache is too large for this soak")
    log = server.log()
    if "Traceback" in log:
        tally.violate("a traceback in the server's log:\n" + log[log.index("Traceback") :][:3000])
    code = await asyncio.to_thread(server.stop)
    if code != 0:
        tally.violate(f"the server ended with exit code {code}")
    report(tally, samples, page, time.monotonic() - started_s)
    return 1 if tally.violations else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--clients", type=int, default=24, help="at once")
    parser.add_argument("--cases", type=int, default=30, help="requests whose answers are found first, alone")
    parser.add_argument("--blocks", type=int, default=70, help="KV blocks; few, so that requests preempt each other")
    parser.add_argument("--request-timeout", type=float, default=180, help="seconds")
    parser.add_argument("serve_flags", nargs="*", help="more flags for kvctl serve, after --")
    options = parser.parse_args()
    model = [options.model] if options.model else []
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", str(options.blocks), "--max-model-len", "1024"]
    flags += ["--max-num-seqs", "16", "--scheduling-policy", "priority", "--disable-uvicorn-access-log"]
    with ServerUnderTest(*model, *flags, *options.serve_flags) as server:
        return asyncio.run(run(options, server))


if __name__ == "__main__":
    sys.exit(main())
