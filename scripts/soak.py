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
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from server_under_test import Page, ServerUnderTest, total

WORDS = ("river", "stone", "cloud", "engine", "garden", "window", "silver", "number", "bridge", "letter", "paper")
RSS_SLACK = 1.05  # of the level once warm
RSS_SLACK_BYTES = 24 << 20
IDLE_TIMEOUT_S = 20
MAX_VIOLATIONS = 20  # more say nothing new
ENDS = "vllm:request_success_total"  # one per child, by reason
POST_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
BAD_REQUESTS: list[tuple[str, bytes, int]] = [
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}', 400),
    ("/v1/completions", b'{"prompt": "a", "temperature": 99}', 400),
    ("/v1/completions", b'{"prompt": []}', 400),
    ("/v1/completions", b'{"prompt": [999999999]}', 400),
    ("/v1/completions", b'{"prompt": "a", "model": "nobody"}', 404),
    ("/v1/completions", b'{"prompt": "a", "logprobs": 5000}', 400),
    ("/v1/completions", b"[" * 5000, 400),
    ("/v1/completions", b'{"prompt": "\xff\xfe"}', 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "n": 0}', 400),
    ("/v1/nothing", b"{}", 404),
    ("/detokenize", b'{"tokens": [-1]}', 400),
]


@dataclass(frozen=True)
class Case:
    """A request whose answer is known once it ran alone; `text` per choice, None where chance decides."""

    path: str
    body: dict[str, Any]
    num_choices: int
    texts: tuple[str, ...] | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0


@dataclass
class Tally:
    """What clients saw."""

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


def text_of(choice: dict[str, Any]) -> str:
    if "message" in choice:
        return choice["message"]["content"] or ""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


class Soak:
    """One load over one server."""

    def __init__(self, server: ServerUnderTest, options: argparse.Namespace) -> None:
        self.server, self.options = server, options
        self.client = self._new_client()
        self.dice = random.Random(options.seed)
        self.tally = Tally()
        self.cases: list[Case] = []

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.options.clients)
        timeout_s = self.options.request_timeout
        return httpx.AsyncClient(base_url=self.server.url, timeout=timeout_s, limits=limits, trust_env=False)

    # ---- what is known before ----

    async def run_alone(self, cases: list[Case]) -> None:
        """Send each case by itself: what it says then, it must say always."""
        for case in cases:
            response = await self.client.post(case.path, json=case.body)
            if response.status_code != 200:
                sys.exit(f"alone, {case.body} got {response.status_code}: {response.text}\n{self.server.log()}")
            answer = response.json()
            texts = tuple(text_of(choice) for choice in answer["choices"])
            usage = answer["usage"]
            known = Case(
                case.path, case.body, case.num_choices, texts, usage["completion_tokens"], usage["prompt_tokens"]
            )
            self.cases.append(known)
            self._ended(known, usage)

    # ---- kinds of clients ----

    def _body(self, case: Case) -> dict[str, Any]:
        return {**case.body, "priority": self.dice.randint(-3, 3)}

    async def whole(self) -> None:
        """An answer in one piece."""
        case = self.dice.choice(self.cases)
        answer = await self.client.post(case.path, json=self._body(case))
        if answer.status_code != 200:
            self.tally.violate(f"a good request got {answer.status_code}: {answer.text[:200]}")
            return
        body = answer.json()
        self._check(case, {choice["index"]: text_of(choice) for choice in body["choices"]}, body["usage"])

    async def streamed(self, pause_s: float = 0.0) -> None:
        """A stream read to its end, slowly or not."""
        case = self.dice.choice(self.cases)
        body = {**self._body(case), "stream": True, "stream_options": {"include_usage": True}}
        texts: dict[int, str] = {}
        finished: Counter[int] = Counter()
        usage, events, is_done = None, 0, False
        async with self.client.stream("POST", case.path, json=body) as answer:
            if answer.status_code != 200:
                self.tally.violate(f"a good stream got {answer.status_code}")
                return
            async for line in answer.aiter_lines():
                if not line:
                    continue
                if is_done:
                    self.tally.violate(f"something follows [DONE]: {line[:100]}")
                events += 1
                if line == "data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.tally.violate(f"a good stream got an error: {event['error']}")
                    return
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    index = choice["index"]
                    if finished[index] and (text_of(choice) or choice["finish_reason"]):
                        self.tally.violate(f"choice {index} goes on after its end")
                    texts[index] = texts.get(index, "") + text_of(choice)
                    finished[index] += choice["finish_reason"] is not None
                if pause_s and events < 60:
                    await asyncio.sleep(pause_s)
        if not is_done:
            self.tally.violate("a stream ended without [DONE]")
        if any(count != 1 for count in finished.values()) or len(finished) != case.num_choices:
            self.tally.violate(f"finish reasons per choice: {dict(finished)}, {case.num_choices} choices")
        self._check(case, texts, usage or {})

    async def slow(self) -> None:
        """A stream read one event at a time with pauses."""
        await self.streamed(self.dice.choice((0.01, 0.05, 0.1)))

    async def by_chance(self) -> None:
        """Sampling without a seed: only the number of tokens is known."""
        n, max_tokens = self.dice.choice((1, 1, 3)), self.dice.choice((3, 40, 120))
        body = {"model": self.server.model, "prompt": words(self.dice, self.dice.choice((2, 80))), "n": n}
        body |= {"max_tokens": max_tokens, "ignore_eos": True, "priority": self.dice.randint(-3, 3)}
        body |= {"logprobs": self.dice.choice((None, 0, 5)), "cache_salt": self.dice.choice((None, "a", "b"))}
        answer = await self.client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            self.tally.violate(f"a good request got {answer.status_code}: {answer.text[:200]}")
            return
        found = answer.json()
        if found["usage"]["completion_tokens"] != n * max_tokens:
            self.tally.violate(f"{found['usage']['completion_tokens']} tokens instead of {n} x {max_tokens}")
        if body["logprobs"] is not None:
            lengths = {len(choice["logprobs"]["tokens"]) for choice in found["choices"]}
            if lengths != {max_tokens}:
                self.tally.violate(f"logprobs of {lengths} tokens instead of {max_tokens}")
        self._count(n, found["usage"])

    async def leaver(self) -> None:
        """Closes the connection after a few events, or before any."""
        case = self.dice.choice(self.cases)
        is_stream, after_s = self.dice.random() < 0.6, self.dice.choice((0.0, 0.01, 0.1, 0.5))
        body = {**self._body(case), "stream": is_stream, "max_tokens": 200, "ignore_eos": True}
        self.tally.left_children += case.num_choices
        try:
            async with asyncio.timeout(after_s), self.client.stream("POST", case.path, json=body) as answer:
                async for _ in answer.aiter_bytes():
                    if is_stream and self.dice.random() < 0.1:
                        return
        except TimeoutError:
            pass

    async def never_reads(self) -> None:
        """Asks for a stream, does not read it, and resets the connection later."""
        host, port = self.server.url.removeprefix("http://").split(":")
        body = {"model": self.server.model, "prompt": words(self.dice, 30), "max_tokens": 150, "ignore_eos": True}
        content = json.dumps({**body, "stream": True, "n": 2, "logprobs": 5}).encode()
        head = f"{POST_HEAD}{len(content)}\r\n\r\n"
        self.tally.left_children += 2
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(head.encode() + content)
        await writer.drain()
        await asyncio.sleep(self.dice.choice((0.2, 1.0, 3.0)))
        writer.transport.abort()

    async def half_request(self) -> None:
        """Sends a part of a request and leaves."""
        host, port = self.server.url.removeprefix("http://").split(":")
        whole = f'{POST_HEAD}900\r\n\r\n{{"prompt":'.encode()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole[: self.dice.randrange(len(whole))])
        await writer.drain()
        await asyncio.sleep(self.dice.choice((0.0, 0.2)))
        writer.close()

    async def bad(self) -> None:
        """Gets the status it deserves."""
        path, content, status = self.dice.choice(BAD_REQUESTS)
        answer = await self.client.post(path, content=content, headers={"content-type": "application/json"})
        if answer.status_code != status:
            self.tally.violate(f"{path} {content[:60]!r} got {answer.status_code}, not {status}: {answer.text[:200]}")

    async def operator(self) -> None:
        """Looks at the pages that are polled, and at the tokenizer."""
        for path in ("/metrics", "/health", "/v1/models"):
            answer = await self.client.get(path)
            if answer.status_code != 200:
                self.tally.violate(f"{path} got {answer.status_code}")
        text = words(self.dice, 12)
        tokens = (await self.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
        back = (await self.client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        if back["prompt"] != text:
            self.tally.violate(f"tokenized and back: {text!r} became {back['prompt']!r}")

    # ---- checks ----

    def _count(self, num_choices: int, usage: dict[str, Any]) -> None:
        self.tally.ended_children += num_choices
        self.tally.completion_tokens += usage["completion_tokens"]
        self.tally.prompt_tokens += usage["prompt_tokens"] * num_choices

    def _ended(self, case: Case, usage: dict[str, Any]) -> None:
        self._count(case.num_choices, usage)

    def _check(self, case: Case, texts: dict[int, str], usage: dict[str, Any]) -> None:
        assert case.texts is not None
        if not usage:
            self.tally.violate("no usage came")
            return
        self._ended(case, usage)
        found = tuple(texts[index] for index in sorted(texts))
        if found != case.texts:
            self.tally.violate(f"text differs from the one alone: {case.body}\n  alone {case.texts}\n  now   {found}")
        if (usage["completion_tokens"], usage["prompt_tokens"]) != (case.num_tokens, case.num_prompt_tokens):
            self.tally.violate(f"tokens differ from those alone ({case.num_tokens}): {usage}: {case.body}")

    # ---- running ----

    async def worker(self, kinds: list[tuple[str, Callable[[], Awaitable[None]]]], until_s: float) -> None:
        """One client after another, of kinds by chance, until the time is over."""
        while time.monotonic() < until_s and len(self.tally.violations) < MAX_VIOLATIONS:
            name, kind = self.dice.choice(kinds)
            self.tally.kinds[name] += 1
            try:
                async with asyncio.timeout(self.options.request_timeout):
                    await kind()
            except TimeoutError:
                self.tally.violate(f"{name} took longer than {self.options.request_timeout:g} s")
            except (httpx.HTTPError, OSError) as error:
                if name not in ("leaver", "never_reads", "half_request"):
                    self.tally.violate(f"{name}: {type(error).__name__}: {error}")

    async def round(self, seconds: float) -> None:
        """Mixed load for a while, ended by its requests."""
        weights = {
            self.whole: 4,
            self.streamed: 5,
            self.slow: 2,
            self.by_chance: 3,
            self.leaver: 3,
            self.never_reads: 1,
            self.half_request: 1,
            self.bad: 2,
            self.operator: 1,
        }
        kinds = [(kind.__name__, kind) for kind, weight in weights.items() for _ in range(weight)]
        until_s = time.monotonic() + seconds
        await asyncio.gather(*(self.worker(kinds, until_s) for _ in range(self.options.clients)))
        await self.client.aclose()  # so that the connections are gone when the server is looked at
        self.client = self._new_client()

    async def wait_idle(self) -> Page:
        """Wait for the server to have nothing; the page then."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            page = await asyncio.to_thread(self.server.page)
            in_flight = httpx.get(f"{self.server.url}/health", trust_env=False).json()["in_flight"]
            busy = {name: total(page, name) for name in names} | {"in_flight": in_flight}
            if not any(busy.values()):
                return page
            if time.monotonic() > deadline_s:
                self.tally.violate(f"not idle after {IDLE_TIMEOUT_S} s without requests: {busy}")
                return page
            await asyncio.sleep(0.1)

    def check_page(self, page: Page) -> None:
        """All counters of an idle server must add up, and agree with what clients saw."""
        tally = self.tally

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


def check_flat(tally: Tally, samples: list[dict[str, float]]) -> None:
    """Compare the idle server's resources late with those once warm."""
    if len(samples) < 4:
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


def report(tally: Tally, samples: list[dict[str, float]], page: Page, seconds: float) -> None:
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
    for name in samples[0]:
        unit = 1 << 20 if name.endswith("_bytes") else 1
        values = [samples[0][name], samples[min(1, len(samples) - 1)][name], samples[-1][name]]
        label = name.replace("_bytes", " MiB")
        print(f"{label:<18}" + "".join(f"{value / unit:>14,.0f}" for value in values))
    print(f"{len(tally.violations)} violations")


async def run(options: argparse.Namespace, server: ServerUnderTest) -> int:
    soak = Soak(server, options)
    begun_s = time.monotonic()
    await soak.run_alone(make_cases(soak.dice, server.model, options.cases))
    started_s = time.monotonic()
    until_s = started_s + options.minutes * 60
    round_s = max(5.0, min(60.0, options.minutes * 60 / 8))
    print(f"{options.cases} answers known after {started_s - begun_s:.0f} s; rounds of {round_s:.0f} s", flush=True)
    samples: list[dict[str, float]] = []
    page = await soak.wait_idle()
    while time.monotonic() + round_s / 2 < until_s and len(soak.tally.violations) < MAX_VIOLATIONS:
        await soak.round(round_s)
        page = await soak.wait_idle()
        soak.check_page(page)
        series = sum(not name.startswith(("process_", "python_")) for name, _ in page)
        now = {**server.resources(), "metric series": series}
        samples.append(now)
        print(
            f"round {len(samples)}: {sum(soak.tally.kinds.values()):,} clients, "
            f"{total(page, 'vllm:num_preemptions_total'):,.0f} preemptions, API {now['api rss_bytes'] >> 20} MiB, "
            f"engine {now['engine rss_bytes'] >> 20} MiB, {len(soak.tally.violations)} violations",
            flush=True,
        )
    await soak.client.aclose()
    check_flat(soak.tally, samples)
    if total(page, "vllm:num_preemptions_total") == 0:
        soak.tally.violate("no preemption happened: the KV cache is too large for this soak")
    log = server.log()
    if "Traceback" in log:
        soak.tally.violate("a traceback in the server's log:\n" + log[log.index("Traceback") :][:3000])
    code = await asyncio.to_thread(server.stop)
    if code != 0:
        soak.tally.violate(f"the server ended with exit code {code}")
    report(soak.tally, samples, page, time.monotonic() - started_s)
    return 1 if soak.tally.violations else 0


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
