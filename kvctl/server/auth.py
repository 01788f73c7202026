"""The API key check, in front of everything else: guards /v1, leaves health, metrics and docs open.

Knows no route. Keys are compared as digests in constant time, all of them each time. Floor 3.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

_BODY = b'{"error":"Unauthorized"}'  # vLLM's, a string and no object


class ApiKeyGuard:
    """ASGI application that asks for `Authorization: Bearer KEY` under /v1."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] != "http" or self._is_open(scope) or self._knows_key(scope):
            await self._app(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(_BODY)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": _BODY})

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        return scope["method"] == "OPTIONS" or not (path == "/v1" or path.startswith("/v1/"))

    def _knows_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(matches)
