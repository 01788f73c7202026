"""One connection to the scripted server: reads requests, writes answers at the moments of the script. Floor 3."""

import json
from time import perf_counter
from typing import Any

import httptools

from kvctl.bench.mock_script import Endpoint, StreamPlan, usage_of, whole_answer
from kvctl.bench.mock_state import MockState, StreamLog
from kvctl.bench.wire import Read, Wire

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_MAX_LOGGED_STREAMS = 200_000


class MockConnection:
    """One client connection. httptools calls the `on_*` methods."""

    def __init__(self, state: MockState) -> None:
        self._state = state
        self._wire: Wire | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._received_s = 0.0
        self._reset_request()

    def _reset_request(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []

    def attach(self, wire: Wire) -> None:
        """Take the open connection to answer on."""
        self._wire = wire

    def lost(self, error: OSError | None) -> None:
        """The client has gone."""
        self._wire = None

    def receive(self, reads: list[Read]) -> None:
        """Take bytes of a request."""
        try:
            for (data, _, _), received_s in zip(reads, self._state.clock.arrivals_s(reads), strict=True):
                self._received_s = received_s
                self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close_abruptly()

    def on_url(self, url: bytes) -> None:
        """httptools: the path, perhaps in parts."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """httptools: the request is complete."""
        url, headers, body = self._url.split(b"?")[0].decode(), self._headers, b"".join(self._body)
        self._reset_request()
        self._route(url, headers, body)

    def _route(self, url: str, headers: dict[bytes, bytes], body: bytes) -> None:
        state = self._state
        if url == "/mock/log":
            streams = [(log.request_id, log.received_s, list(log.written_s)) for log in state.log]
            self._answer(200, {"streams": streams, "max_running": state.max_running, "requests": state.num_requests})
        elif url == "/mock/reset":
            state.log.clear()
            state.max_running = state.num_running
            self._answer(200, {})
        elif url == "/metrics":
            self.write(_response(200, state.metrics_text().encode(), b"text/plain; version=0.0.4"))
        elif url == "/health":
            self._answer(200, {})
        elif state.script.api_key and headers.get(b"authorization") != f"Bearer {state.script.api_key}".encode():
            self._answer(401, {"error": "Unauthorized"})
        elif url == "/v1/models":
            card = {"id": state.script.model, "object": "model", "created": 1, "owned_by": "kvctl"}
            self._answer(200, {"object": "list", "data": [card]})
        elif url == "/v1/completions":
            self._generate("completions", headers, body)
        elif url == "/v1/chat/completions":
            self._generate("chat", headers, body)
        else:
            self._answer(404, {"error": {"message": "Not Found", "type": "Not Found", "code": 404}})

    def _generate(self, endpoint: Endpoint, headers: dict[bytes, bytes], body: bytes) -> None:
        state, script = self._state, self._state.script
        try:
            request: dict[str, Any] = json.loads(body)
            prompt, num_ids = _prompt_of(request, endpoint)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._answer(400, {"error": {"message": "the body is not a request", "type": "Bad Request", "code": 400}})
            return
        if request.get("model") not in (None, script.model):
            message = f"The model `{request['model']}` does not exist."
            self._answer(404, {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}})
            return
        state.num_requests += 1
        fault = script.fault if script.fault and state.rng.random() < script.fault_share else None
        if fault in ("429", "503", "500"):
            error = {"error": {"message": f"scripted {fault}", "type": "Scripted", "code": int(fault)}}
            retry = None if script.retry_after_s is None or fault == "500" else script.retry_after_s
            self._answer(int(fault), error, retry_after_s=retry)
            return
        if fault == "html":
            self.write(_response(200, b"<html><body>Welcome to nginx!</body></html>", b"text/html"))
            return
        if fault == "hang":
            return
        asked = request.get("max_completion_tokens") or request.get("max_tokens") or 16
        num_tokens = int(script.tokens or asked)
        if not request.get("stream"):
            num_tokens = min(num_tokens, int(asked))
        prompt_tokens, cached_tokens = state.count_prompt(prompt, num_ids)
        if endpoint == "chat":
            prompt_tokens += script.prompt_overhead_tokens
        state.output_tokens += num_tokens
        if request.get("stream"):
            options = request.get("stream_options") or {}
            plan = state.writer.plan(
                endpoint,
                num_tokens,
                fault=fault,
                include_usage=bool(options.get("include_usage")),
                continuous_usage=bool(options.get("continuous_usage_stats")),
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
            )
            log = StreamLog(headers.get(b"x-request-id", b"").decode(), self._received_s)
            state.start_or_queue(lambda: _Stream(self, state, plan, log).begin())
        else:
            usage = usage_of(prompt_tokens, num_tokens, cached_tokens, 0)
            answer = whole_answer(script, endpoint, num_tokens, usage)
            state.start_or_queue(lambda: self._answer_later(answer, num_tokens))

    def _answer_later(self, answer: dict[str, Any], num_tokens: int) -> None:
        script = self._state.script

        def send() -> None:
            self._answer(200, answer)
            self._state.finish()

        self._state.timer.call_at(perf_counter() + script.ttft_s + (num_tokens - 1) * script.gap_s, send)

    def _answer(self, status: int, value: dict[str, Any], *, retry_after_s: float | None = None) -> None:
        self.write(_response(status, json.dumps(value).encode(), b"application/json", retry_after_s))

    def write(self, data: bytes) -> bool:
        """Hand bytes to the kernel now. False: the client has gone."""
        if self._wire is None:
            return False
        try:
            self._wire.send(data)
        except OSError:
            self.close_abruptly()
            return False
        return True

    def close_abruptly(self) -> None:
        """Cut the connection, as a server that dies does."""
        if self._wire is not None:
            self._wire.abort()
            self._wire = None


class _Stream:
    """One streamed answer on its way out."""

    __slots__ = ("_begin_s", "_connection", "_log", "_next", "_plan", "_state")

    def __init__(self, connection: MockConnection, state: MockState, plan: StreamPlan, log: StreamLog) -> None:
        self._connection = connection
        self._state = state
        self._plan = plan
        self._log = log
        self._next = 0

    def begin(self) -> None:
        waited = self._state.script.slots > 0
        self._begin_s = perf_counter() if waited else self._log.received_s
        self._connection.write(_STREAM_HEAD)
        self._advance()

    def _advance(self) -> None:
        writes = self._plan.writes
        while self._next < len(writes):
            write = writes[self._next]
            due_s = self._begin_s + write.at_s
            if due_s > perf_counter() + 20e-6:
                self._state.timer.call_at(due_s, self._advance)
                return
            self._next += 1
            if not self._connection.write(write.data):
                break
            if write.num_tokens:
                self._log.written_s.append(perf_counter())
        if self._plan.cut:
            self._connection.close_abruptly()
        if len(self._state.log) < _MAX_LOGGED_STREAMS:
            self._state.log.append(self._log)
        self._state.finish()


def _prompt_of(request: dict[str, Any], endpoint: Endpoint) -> tuple[str, int]:
    """The prompt as text, and the number of token ids where it was given as ids."""
    if endpoint == "chat":
        return "\n".join(str(message.get("content") or "") for message in request["messages"]), 0
    prompt = request["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return " ".join(map(str, prompt)), len(prompt)
    if not isinstance(prompt, str):
        raise TypeError("prompt")
    return prompt, 0


def _response(status: int, body: bytes, content_type: bytes, retry_after_s: float | None = None) -> bytes:
    head = b"HTTP/1.1 %d Scripted\r\ncontent-type: %b\r\ncontent-length: %d\r\n" % (status, content_type, len(body))
    if retry_after_s is not None:
        head += b"retry-after: %g\r\n" % retry_after_s
    return head + b"\r\n" + body
