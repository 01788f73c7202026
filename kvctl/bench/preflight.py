"""Everything asked of the server before the clock runs: is it one, which model, what it accepts, how it counts.

Uses httpx and takes its time: nothing here is measured. A field that a server refuses is left out, and the result
says so; a server that is none is told from its answer. Floor 3.
"""

import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import httpx

from kvctl.bench.body import BodyBuilder
from kvctl.bench.run_config import PATHS, RequestConfig
from kvctl.bench.sse import SseParser
from kvctl.bench.stream_decoder import StreamDecoder
from kvctl.bench.tls import tls_context
from kvctl.errors import KvctlError, ModelNotFound, ServerUnreachable
from kvctl.workload.prompts import WORDS, PromptMaker, TokenRate
from kvctl.workload.request_plan import Turn

_PROBE_WORDS = (len(WORDS), 2 * len(WORDS))  # whole rounds of the words: their mean cost
_MAX_CORRECTIONS = 2
_REFUSALS = (400, 422)
_OVERLOADED = (429, 503)
_MAX_RETRIES = 3  # of an overloaded server
_MAX_RETRY_WAIT_S = 10.0
_CONNECT_TIMEOUT_S = 10.0


_KEY_HINT = "Give --api-key and set KVCTL_API_KEY (or OPENAI_API_KEY) to a key that it takes."
_BODY_HINT = "A field that the server wants can be given with --extra-body."


@dataclass(frozen=True)
class Preflight:
    """What was found out."""

    request: RequestConfig
    rate: TokenRate
    server: str  # the Server header
    max_model_len: int | None
    round_trip_s: float
    tells_usage: bool
    notes: tuple[str, ...] = ()


class PreflightClient:
    """Asks one server. Use as a context manager."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        verify_tls: bool = True,
        timeout_s: float = 60.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._url = url.rstrip("/")
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
        self._client = httpx.Client(
            headers=dict(headers), verify=tls_context(verify_tls), timeout=timeout, trust_env=False
        )
        self._notes: list[str] = []
        self._say = say

    def __enter__(self) -> "PreflightClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def run(self, request: RequestConfig, *, prompt_tokens: int | None) -> Preflight:
        """Find the model, agree on the fields, learn how prompts are counted (`prompt_tokens`: the usual length).

        Raises:
            ServerUnreachable: no server, no OpenAI-compatible server, or it refuses us.
            ModelNotFound: it has no such model.
        """
        model, max_model_len, server, round_trip_s = self._find_model(request.model)
        request = replace(request, model=model)
        request, decoder = self._agree(request)
        rate = TokenRate()
        tells_usage = decoder.prompt_tokens is not None
        if not tells_usage:
            self._notes.append(
                "the server tells no usage: tokens are counted as events, prompt lengths are not verified"
            )
        elif prompt_tokens is not None:
            rate = self._learn_rate(request, prompt_tokens)
        return Preflight(request, rate, server, max_model_len, round_trip_s, tells_usage, tuple(self._notes))

    # ---- which model ----

    def _find_model(self, wanted: str | None) -> tuple[str, int | None, str, float]:
        response = self._send("GET", "/v1/models")
        begin_s = perf_counter()
        response = self._send("GET", "/v1/models")
        round_trip_s = perf_counter() - begin_s
        server = response.headers.get("server", "")
        if response.status_code in (401, 403):
            raise ServerUnreachable(
                f"{self._url} refuses the API key (HTTP {response.status_code})",
                hint=_KEY_HINT,
            )
        if response.status_code != 200 or not _is_json(response):
            if wanted is not None and response.status_code in (404, 405):
                self._notes.append("the server has no /v1/models: the model's name was taken as given")
                return wanted, None, server, round_trip_s
            raise ServerUnreachable(
                f"{self._url} is not an OpenAI-compatible server: /v1/models gives HTTP {response.status_code}, "
                f"{response.headers.get('content-type', 'no content type').split(';')[0]}",
                hint="Give the address before /v1, e.g. http://127.0.0.1:8000; or name the model with --model.",
            )
        try:
            cards = {str(card["id"]): card for card in response.json()["data"]}
        except (ValueError, KeyError, TypeError):
            raise ServerUnreachable(
                f"{self._url}/v1/models is JSON, but no list of models", hint="Is this an OpenAI-compatible server?"
            ) from None
        if wanted is None:
            if not cards:
                raise ModelNotFound(f"{self._url} serves no model", hint="Load one, or name one with --model.")
            wanted = next(iter(cards))
        elif wanted not in cards:
            known = ", ".join(list(cards)[:5])
            raise ModelNotFound(f"{self._url} serves no model {wanted!r}", hint=f"It serves {known}.")
        limit = cards[wanted].get("max_model_len")
        return wanted, limit if isinstance(limit, int) else None, server, round_trip_s

    # ---- which fields ----

    def _agree(self, request: RequestConfig) -> tuple[RequestConfig, StreamDecoder]:
        """Send a test request; leave out what is refused, one field at a time, until it is taken."""
        tried_chat, retries = request.endpoint == "chat", 0
        while True:
            response = self._post(request, Turn("Say the word ready and nothing else.", 4))
            if response.status_code == 200:
                return request, self._check_stream(request, response)
            text = response.text
            if response.status_code in _OVERLOADED and retries < _MAX_RETRIES:
                retries += 1
                wait_s = _retry_wait_s(response)
                self._say(f"the server is overloaded (HTTP {response.status_code}): asking again in {wait_s:g} s")
                time.sleep(wait_s)
                continue
            if (
                response.status_code in (404, 405)
                and not tried_chat
                and "model" not in _error_message(response).lower()
            ):
                tried_chat = True
                request = replace(request, endpoint="chat")
                self._notes.append("the server has no /v1/completions: /v1/chat/completions is used")
                continue
            smaller = _without_refused(request, text) if response.status_code in _REFUSALS else None
            if smaller is None:
                raise self._refused(response)
            request, what = smaller
            self._notes.append(f"the server refuses {what}: left out")

    def _check_stream(self, request: RequestConfig, response: httpx.Response) -> StreamDecoder:
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise ServerUnreachable(
                f"{self._url}{PATHS[request.endpoint]} answers with {kind.split(';')[0] or 'no content type'}, "
                "not with a stream of events",
                hint=f"It begins: {response.text[:60].strip()!r}",
            )
        decoder = StreamDecoder()
        payloads = SseParser().feed(response.content)
        decoder.decode([perf_counter()] * len(payloads), payloads)
        problem = decoder.error or decoder.malformed
        if problem:
            raise ServerUnreachable(f"the test request failed: {problem}", hint="Look at the server's log.")
        return decoder

    def _refused(self, response: httpx.Response) -> KvctlError:
        status, said = response.status_code, _error_message(response)
        if status in (401, 403):
            return ServerUnreachable(f"{self._url} refuses the API key (HTTP {status})", hint=_KEY_HINT)
        if status == 404:
            return ServerUnreachable(
                f"{response.request.url} is not found: {said}",
                hint="Give the address before /v1, and --endpoint completions or chat.",
            )
        hint = "Try again later." if status in _OVERLOADED else "Look at the server's log."
        return ServerUnreachable(
            f"the test request was refused with HTTP {status}: {said}", hint=_BODY_HINT if status in _REFUSALS else hint
        )

    # ---- how prompts are counted ----

    def _learn_rate(self, request: RequestConfig, prompt_tokens: int) -> TokenRate:
        """Two probes tell what a word costs, at most two more correct the wanted length. Never fails the run."""
        maker = PromptMaker(seed=0)
        few, many = (self._count(request, maker.unique(words)) for words in _PROBE_WORDS)
        rate = None
        if few is not None and many is not None:
            rate = TokenRate.from_probes((_PROBE_WORDS[0], few), (_PROBE_WORDS[1], many))
        if rate is None:
            self._notes.append("how the server counts prompts could not be learned: lengths are in words")
            return TokenRate()
        if rate.is_one_token_per_word:
            return rate
        words = rate.words_below(prompt_tokens)
        for _ in range(_MAX_CORRECTIONS):
            counted = self._count(request, maker.unique(words))
            if counted is None:
                self._notes.append("the length of prompts could not be verified")
                return rate
            rate = rate.verified(words, counted)
            if rate.is_exact_at(prompt_tokens):
                return rate
            words = rate.words_near_verified(prompt_tokens)
        self._notes.append(f"prompts could not be made exactly {prompt_tokens} tokens long: see input_tokens")
        return rate

    def _count(self, request: RequestConfig, text: str) -> int | None:
        response = self._post(replace(request, extra_body={**request.extra_body, "stream": False}), Turn(text, 1))
        try:
            count = response.json()["usage"]["prompt_tokens"]
        except (ValueError, KeyError, TypeError):
            return None
        return count if isinstance(count, int) else None

    # ---- transport ----

    def _post(self, request: RequestConfig, turn: Turn) -> httpx.Response:
        options = dict(request.extra_body)
        if options.get("stream") is False:
            request = replace(request, include_usage=False)
        return self._send("POST", PATHS[request.endpoint], BodyBuilder(request).build(turn))

    def _send(self, method: str, path: str, body: bytes | None = None) -> httpx.Response:
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            return self._client.request(method, self._url + path, content=body, headers=headers)
        except httpx.TimeoutException:
            raise ServerUnreachable(
                f"{self._url}{path} does not answer in time", hint="Is it still loading? See --timeout."
            ) from None
        except httpx.ConnectError as error:
            if isinstance(error.__cause__, ssl.SSLError) or "CERTIFICATE" in str(error) or "SSL" in str(error):
                raise ServerUnreachable(
                    f"no TLS with {self._url}: {error}", hint="A self-signed certificate is accepted with --insecure."
                ) from None
            raise ServerUnreachable(
                f"nothing answers at {self._url}: {error}", hint="Start the server, or check the address."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ServerUnreachable(
                f"{self._url} does not speak HTTP: {error}", hint="Write the address like http://127.0.0.1:8000."
            ) from None


def _retry_wait_s(response: httpx.Response) -> float:
    """What Retry-After says, a second where it says nothing that can be read."""
    try:
        wait_s = float(response.headers.get("retry-after", 1.0))
    except ValueError:
        wait_s = 1.0
    return min(wait_s, _MAX_RETRY_WAIT_S) if wait_s >= 0 else 1.0


def _is_json(response: httpx.Response) -> bool:
    try:
        response.json()
    except ValueError:
        return False
    return True


def _error_message(response: httpx.Response) -> str:
    try:
        value: Any = json.loads(response.content)
    except ValueError:
        return " ".join(response.text[:120].split())
    error = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return " ".join(str(error)[:200].split())


def _without_refused(request: RequestConfig, said: str) -> tuple[RequestConfig, str] | None:
    """The request without the field that the refusal names, or without the least usual one left; None: nothing left."""
    said = said.lower()
    if "max_completion_tokens" in said and request.limit_field == "max_tokens":
        return replace(request, limit_field="max_completion_tokens"), "max_tokens (max_completion_tokens is used)"
    removable: list[tuple[str, RequestConfig]] = []
    if request.continuous_usage:
        removable.append(("continuous_usage_stats", replace(request, continuous_usage=False)))
    if request.ignore_eos:
        removable.append(("ignore_eos", replace(request, ignore_eos=False)))
    if request.temperature is not None:
        removable.append(("temperature", replace(request, temperature=None)))
    if request.include_usage:
        removable.append(("stream_options", replace(request, include_usage=False, continuous_usage=False)))
    for name, smaller in removable:
        if name in said:
            return smaller, name
    return (removable[0][1], removable[0][0]) if removable else None
