"""Fetches a metrics page: GET only, one kept connection, hard limits on time and size.

Knows HTTP and nothing of metrics. Any failure is a `Scrape` with an error for people, never an exception: a server
that restarts is a normal sight. A page that never ends, or drips, is cut off at the deadline. Redirects are
followed on the same host only, so that a key never travels elsewhere. Floor 3.
"""

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urljoin, urlsplit

from kvctl.metrics.exposition import printable
from kvctl.top.endpoint import Endpoint

_CHUNK_BYTES = 256 << 10
_MAX_BYTES = 16 << 20  # 50,000 series take about 7 MiB
_MAX_REDIRECTS = 3
_WRONG_PATH = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One attempt. Exactly one of `text` and `error` is set."""

    url: str
    at_s: float  # wall clock, but never going back
    text: str | None
    error: str | None
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScrapeOptions:
    """How to ask: extra headers, the key for `Authorization: Bearer`, and the limits."""

    headers: Mapping[str, str]
    api_key: str | None = None
    insecure: bool = False  # accept any TLS certificate
    timeout_s: float = 5.0
    max_bytes: int = _MAX_BYTES


class _NoPageError(Exception):
    """Why there is no page; `is_wrong_path`: another path of the same server may have it."""

    def __init__(self, message: str, *, is_wrong_path: bool = False) -> None:
        super().__init__(message)
        self.is_wrong_path = is_wrong_path


class SteadyClock:
    """Wall time that never jumps: read once, then carried on by the monotonic clock."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Return seconds since the epoch."""
        return self._offset_s + time.monotonic()


class Scraper:
    """Asks one endpoint, again and again. Not thread-safe: one thread per scraper."""

    def __init__(self, endpoint: Endpoint, options: ScrapeOptions, clock: SteadyClock) -> None:
        self.endpoint = endpoint
        self._options = options
        self._clock = clock
        self._connection: http.client.HTTPConnection | None = None
        self._path = endpoint.paths[0]

    def scrape(self) -> Scrape:
        """Fetch the page once; tries again at once where a kept connection had been closed by the server."""
        began = time.monotonic()
        deadline = began + self._options.timeout_s
        error = ""
        for path in self._candidates():
            try:
                text = self._fetch(path, deadline)
            except _NoPageError as failure:
                error = str(failure)
                if not failure.is_wrong_path:
                    break
                continue
            self._path = path
            took_s = time.monotonic() - began
            return Scrape(self.endpoint.url, self._clock() - took_s / 2, text, None, took_s)
        return Scrape(self.endpoint.url, self._clock(), None, error, time.monotonic() - began)

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _candidates(self) -> tuple[str, ...]:
        return (self._path, *(path for path in self.endpoint.paths if path != self._path))

    def _fetch(self, path: str, deadline: float) -> str:
        """One page; a second try where the server had closed the kept connection in between."""
        if self._connection is not None:
            try:
                return self._attempt(path, deadline)
            except _NoPageError as failure:
                if failure.is_wrong_path or time.monotonic() >= deadline:
                    raise
        return self._attempt(path, deadline)

    def _attempt(self, path: str, deadline: float) -> str:
        timer: threading.Timer | None = None
        try:
            connection = self._connect(deadline)
            timer = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, [connection])
            timer.daemon = True
            timer.start()
            status, body = self._get(connection, path, deadline)
            if time.monotonic() >= deadline:
                raise TimeoutError  # `_cut` ended the transfer: what came is not the page
        except (http.client.HTTPException, OSError, ValueError) as error:
            self.close()
            late = time.monotonic() >= deadline
            raise _NoPageError(f"no answer in {self._options.timeout_s:g} s" if late else _reason(error)) from None
        finally:
            if timer is not None:
                timer.cancel()
        if status != HTTPStatus.OK:
            raise _NoPageError(f"HTTP {status} at {path}", is_wrong_path=status in _WRONG_PATH)
        text = body.decode("utf-8", errors="replace")
        if text.lstrip()[:1] in ("[", "{"):
            raise _NoPageError(f"JSON, not metrics, at {path}", is_wrong_path=True)
        return text

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        left_s = max(0.05, deadline - time.monotonic())
        if self._connection is None:
            endpoint = self.endpoint
            if endpoint.scheme == "https":
                context = ssl.create_default_context()
                if self._options.insecure:
                    context.check_hostname = False
                    context.verify_mode = ssl.CERT_NONE
                self._connection = http.client.HTTPSConnection(
                    endpoint.host, endpoint.port, timeout=left_s, context=context
                )
            else:
                self._connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=left_s)
            self._connection.connect()
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(left_s)
        return self._connection

    def _get(self, connection: http.client.HTTPConnection, path: str, deadline: float) -> tuple[int, bytes]:
        headers = {"Accept": "text/plain;version=0.0.4, */*;q=0.1", "User-Agent": "kvctl-top", **self._options.headers}
        if self._options.api_key:
            headers["Authorization"] = f"Bearer {self._options.api_key}"
        for _ in range(_MAX_REDIRECTS):
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            with response:  # read1 leaves it open at the end, and the connection could not be used again
                body = self._read(response, deadline)
            target = response.getheader("Location")
            if response.status not in (301, 302, 307, 308) or not target:
                return response.status, body
            parts = urlsplit(urljoin(f"{self.endpoint.scheme}://{connection.host}:{connection.port}{path}", target))
            if (parts.scheme, parts.hostname, parts.port or connection.port) != (
                self.endpoint.scheme,
                connection.host,
                connection.port,
            ):
                raise ValueError(f"redirects to another host, {printable(target, limit=60)}")
            path = parts.path + (f"?{parts.query}" if parts.query else "")
        raise ValueError("redirects in a circle")

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        chunks = []
        left = self._options.max_bytes
        while left > 0:
            chunk = response.read1(min(_CHUNK_BYTES, left))
            if not chunk:
                break
            chunks.append(chunk)
            left -= len(chunk)
            if time.monotonic() > deadline:
                raise TimeoutError
        if left <= 0:
            raise ValueError(f"the page is larger than {self._options.max_bytes >> 20} MiB")
        if response.length:
            raise ConnectionError("the page broke off")
        return b"".join(chunks)


def _cut(connection: http.client.HTTPConnection) -> None:
    """End a transfer that outlived its deadline, from another thread."""
    sock = connection.sock
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return "unknown host"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS certificate not trusted ({printable(error.verify_message, limit=60)})"
    return printable(str(error) or type(error).__name__, limit=100)
