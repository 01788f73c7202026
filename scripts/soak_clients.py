"""The clients of a soak: those that behave, those that leave, those that send nonsense. Each checks its own answer.

Knows the API and the oracle it reports to, no schedule and no server process. Not a command.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from soak_oracle import Case, Tally, words

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


def text_of(choice: dict[str, Any]) -> str:
    if "message" in choice:
        return choice["message"]["content"] or ""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


class Clients:
    """One crowd of clients at one address; `kinds` are its members as often as they come. Ends with `aclose`."""

    may_lose_their_connection = ("leaver", "never_reads", "half_request")

    def __init__(
        self, url: str, model: str, tally: Tally, dice: random.Random, *, at_once: int, timeout_s: float
    ) -> None:
        self._url, self._model = url, model
        self._tally, self._dice = tally, dice
        self._at_once, self._timeout_s = at_once, timeout_s
        self._cases: list[Case] = []
        self._http = self._connect()
        weights: dict[Callable[[], Awaitable[None]], int] = {
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
        self.kinds = [(kind.__name__, kind) for kind, weight in weights.items() for _ in range(weight)]

    def _connect(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._at_once)
        return httpx.AsyncClient(base_url=self._url, timeout=self._timeout_s, limits=limits, trust_env=False)

    async def drop_connections(self) -> None:
        """Close what is kept open between requests."""
        await self._http.aclose()
        self._http = self._connect()

    async def aclose(self) -> None:
        """Close all connections for good."""
        await self._http.aclose()

    async def run_alone(self, cases: list[Case]) -> None:
        """Send each case by itself: what it says then, it must say always.

        Raises:
            SystemExit: one is refused; nothing can be compared then.
        """
        for case in cases:
            response = await self._http.post(case.path, json=case.body)
            if response.status_code != httpx.codes.OK:
                raise SystemExit(f"alone, {case.body} got {response.status_code}: {response.text}")
            answer = response.json()
            texts, usage = tuple(map(text_of, answer["choices"])), answer["usage"]
            tokens = usage["completion_tokens"], usage["prompt_tokens"]
            self._cases.append(Case(case.path, case.body, case.num_choices, texts, *tokens))
            self._tally.count(case.num_choices, usage)

    # ---- those that behave ----

    def _body(self, case: Case) -> dict[str, Any]:
        return {**case.body, "priority": self._dice.randint(-3, 3)}

    async def whole(self) -> None:
        """An answer in one piece."""
        case = self._dice.choice(self._cases)
        answer = await self._http.post(case.path, json=self._body(case))
        if answer.status_code != httpx.codes.OK:
            self._tally.violate(f"a good request got {answer.status_code}: {answer.text[:200]}")
            return
        body = answer.json()
        self._tally.check(case, {choice["index"]: text_of(choice) for choice in body["choices"]}, body["usage"])

    async def streamed(self, pause_s: float = 0.0) -> None:
        """A stream read to its end, slowly or not."""
        case = self._dice.choice(self._cases)
        body = {**self._body(case), "stream": True, "stream_options": {"include_usage": True}}
        texts: dict[int, str] = {}
        finished: Counter[int] = Counter()
        usage, events, is_done = None, 0, False
        async with self._http.stream("POST", case.path, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                self._tally.violate(f"a good stream got {answer.status_code}")
                return
            async for line in answer.aiter_lines():
                if not line:
                    continue
                if is_done:
                    self._tally.violate(f"something follows [DONE]: {line[:100]}")
                events += 1
                if line == "data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self._tally.violate(f"a good stream got an error: {event['error']}")
                    return
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    index = choice["index"]
                    if finished[index] and (text_of(choice) or choice["finish_reason"]):
                        self._tally.violate(f"choice {index} goes on after its end")
                    texts[index] = texts.get(index, "") + text_of(choice)
                    finished[index] += choice["finish_reason"] is not None
                if pause_s and events < 60:
                    await asyncio.sleep(pause_s)
        if not is_done:
            self._tally.violate("a stream ended without [DONE]")
        if any(count != 1 for count in finished.values()) or len(finished) != case.num_choices:
            self._tally.violate(f"finish reasons per choice: {dict(finished)}, {case.num_choices} choices")
        self._tally.check(case, texts, usage or {})

    async def slow(self) -> None:
        """A stream read one event at a time with pauses."""
        await self.streamed(self._dice.choice((0.01, 0.05, 0.1)))

    async def by_chance(self) -> None:
        """Sampling without a seed: only the number of tokens is known."""
        n, max_tokens = self._dice.choice((1, 1, 3)), self._dice.choice((3, 40, 120))
        body = {"model": self._model, "prompt": words(self._dice, self._dice.choice((2, 80))), "n": n}
        body |= {"max_tokens": max_tokens, "ignore_eos": True, "priority": self._dice.randint(-3, 3)}
        body |= {"logprobs": self._dice.choice((None, 0, 5)), "cache_salt": self._dice.choice((None, "a", "b"))}
        answer = await self._http.post("/v1/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            self._tally.violate(f"a good request got {answer.status_code}: {answer.text[:200]}")
            return
        found = answer.json()
        if found["usage"]["completion_tokens"] != n * max_tokens:
            self._tally.violate(f"{found['usage']['completion_tokens']} tokens instead of {n} x {max_tokens}")
        if body["logprobs"] is not None:
            lengths = {len(choice["logprobs"]["tokens"]) for choice in found["choices"]}
            if lengths != {max_tokens}:
                self._tally.violate(f"logprobs of {lengths} tokens instead of {max_tokens}")
        self._tally.count(n, found["usage"])

    async def operator(self) -> None:
        """Looks at the pages that are polled, and at the tokenizer."""
        for path in ("/metrics", "/health", "/v1/models"):
            answer = await self._http.get(path)
            if answer.status_code != httpx.codes.OK:
                self._tally.violate(f"{path} got {answer.status_code}")
        text = words(self._dice, 12)
        tokens = (await self._http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
        back = (await self._http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        if back["prompt"] != text:
            self._tally.violate(f"tokenized and back: {text!r} became {back['prompt']!r}")

    # ---- those that do not ----

    async def leaver(self) -> None:
        """Closes the connection after a few events, or before any."""
        case = self._dice.choice(self._cases)
        is_stream, after_s = self._dice.random() < 0.6, self._dice.choice((0.0, 0.01, 0.1, 0.5))
        body = {**self._body(case), "stream": is_stream, "max_tokens": 200, "ignore_eos": True}
        self._tally.left_children += case.num_choices
        try:
            async with asyncio.timeout(after_s), self._http.stream("POST", case.path, json=body) as answer:
                async for _ in answer.aiter_bytes():
                    if is_stream and self._dice.random() < 0.1:
                        return
        except TimeoutError:
            pass

    async def never_reads(self) -> None:
        """Asks for a stream, does not read it, and resets the connection later."""
        body = {"model": self._model, "prompt": words(self._dice, 30), "max_tokens": 150, "ignore_eos": True}
        content = json.dumps({**body, "stream": True, "n": 2, "logprobs": 5}).encode()
        self._tally.left_children += 2
        writer = await self._send(f"{POST_HEAD}{len(content)}\r\n\r\n".encode() + content)
        await asyncio.sleep(self._dice.choice((0.2, 1.0, 3.0)))
        writer.transport.abort()

    async def half_request(self) -> None:
        """Sends a part of a request and leaves."""
        whole = f'{POST_HEAD}900\r\n\r\n{{"prompt":'.encode()
        writer = await self._send(whole[: self._dice.randrange(len(whole))])
        await asyncio.sleep(self._dice.choice((0.0, 0.2)))
        writer.close()

    async def bad(self) -> None:
        """Gets the status it deserves."""
        path, content, status = self._dice.choice(BAD_REQUESTS)
        answer = await self._http.post(path, content=content, headers={"content-type": "application/json"})
        if answer.status_code != status:
            self._tally.violate(f"{path} {content[:60]!r} got {answer.status_code}, not {status}: {answer.text[:200]}")

    async def _send(self, data: bytes) -> asyncio.StreamWriter:
        """A connection of its own that has sent `data` and reads next to nothing."""
        host, port = self._url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(data)
        await writer.drain()
        return writer
