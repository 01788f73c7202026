"""Error bodies as OpenAI's and vLLM's clients expect them: {"error": {message, type, param, code}}.

Turns the KvctlError tree, pydantic's complaints and HTTP-level trouble into a status and a body. Knows no
route. Floor 3.
"""

import json
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from kvctl.errors import InvalidRequest, KvctlError, QueueFull

MAX_LISTED_ERRORS = 10
MAX_SHOWN_INPUT_CHARS = 120
_HTTP_PHRASES = {400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}
# names that pydantic puts into a location for the branch of a union it tried: no field of ours
_BRANCHES = frozenset({"str", "int", "float", "bool", "dict", "json-or-python"})


class BodyTooLarge(InvalidRequest):
    """The body is over the limit."""

    http_status = 413
    http_type = "RequestEntityTooLarge"


class BodyTimeout(InvalidRequest):
    """The body did not arrive in time."""

    http_status = 408
    http_type = "RequestTimeout"


class BadBody(InvalidRequest):
    """Not JSON, or not the JSON that was asked for."""

    http_type = "Bad Request"


class ShuttingDown(KvctlError):
    """The server is about to end and takes no more work."""

    http_status = 503
    http_type = "ServiceUnavailableError"


class ClientDisconnected(Exception):
    """The client is gone: there is nobody to answer."""


def error_object(message: str, kind: str, param: str | None, code: int) -> dict[str, Any]:
    """Build the body of one error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Answer with JSON; NaN and infinity cannot get in."""
    content = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(content, status, headers, "application/json")


def describe(error: Exception) -> dict[str, Any]:
    """Build the error body of any exception; what is unknown to us stays in the log and out of the answer."""
    if isinstance(error, KvctlError):
        message = f"{error.message}. {error.hint}" if error.hint else error.message
        return error_object(message, error.http_type, getattr(error, "param", None), error.http_status)
    return error_object("the server failed on this request; its log says why", "InternalServerError", None, 500)


def error_response(error: Exception) -> Response:
    """Answer with an error's status and body."""
    body = describe(error)
    headers = {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(error.retry_after_s)
    elif isinstance(error, ShuttingDown):
        headers.update({"Retry-After": "1", "Connection": "close"})
    return json_response(body, body["error"]["code"], headers)


def http_error(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    """Answer for a route or method that does not exist."""
    return json_response(
        error_object(detail, _HTTP_PHRASES.get(status, "HTTPException"), None, status), status, headers
    )


def _location(parts: tuple[int | str, ...]) -> str:
    """Dotted field path without the names of union branches: 'stop.0', 'messages.1.role'."""
    kept = [str(p) for p in parts if isinstance(p, int) or (p not in _BRANCHES and not any(c in p for c in "[]()"))]
    return ".".join(kept)


def _shorten(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else type(value).__name__
    return text if len(text) <= MAX_SHOWN_INPUT_CHARS else text[:MAX_SHOWN_INPUT_CHARS] + "..."


def from_validation(error: ValidationError) -> BadBody:
    """Say which field is wrong and how: at most ten, each with the start of its value."""
    problems: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        if item["type"] == "json_invalid":
            return BadBody(f"the body is not JSON: {item['msg'].removeprefix('Invalid JSON: ')}")
        where = _location(item["loc"])
        problems.setdefault(where, []).append(item["msg"])
        shown.setdefault(where, "" if item["type"] == "missing" else f" (got {_shorten(item['input'])})")
    lines = [
        f"{where or 'body'}: {' or '.join(dict.fromkeys(messages))}{shown[where]}"
        for where, messages in list(problems.items())[:MAX_LISTED_ERRORS]
    ]
    if len(problems) > MAX_LISTED_ERRORS:
        lines.append(f"and {len(problems) - MAX_LISTED_ERRORS} more")
    return BadBody("; ".join(lines), param=next(iter(problems)) or None)
