"""Error bodies as OpenAI's and vLLM's clients expect them: {"error": {message, type, param, code}}.

Turns the KvctlError tree, pydantic's complaints and HTTP-level trouble into a status and a body. Knows no
route. Floor 3.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from kvctl.errors import InvalidRequest, KvctlError, QueueFull
from kvctl.server.json_answer import dump_json

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
    return Response(dump_json(body).encode("utf-8", "replace"), status, headers, "application/json")


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


Location = tuple[int | str, ...]


def _is_branch(part: int | str) -> bool:
    """Whether a part of pydantic's location names the form of a value it tried, and no field of ours."""
    return isinstance(part, str) and (part in _BRANCHES or any(char in part for char in "[]()"))


def _rank(item: ErrorDetails) -> tuple[bool, tuple[int, ...]]:
    """How far a form of a value came before it failed: a wrong length is nearly right, later elements are further."""
    numbers = tuple(part if isinstance(part, int) else 0 for part in item["loc"] if not _is_branch(part))
    return item["type"] in ("too_long", "too_short"), numbers


def _most_telling(items: Sequence[ErrorDetails]) -> dict[Location, list[ErrorDetails]]:
    """Errors by location; of a value with several forms only those of the form that came furthest."""
    by_value: dict[Location, list[ErrorDetails]] = {}
    for item in items:
        parts = item["loc"]
        end = next((index for index, part in enumerate(parts) if _is_branch(part)), len(parts))
        by_value.setdefault(parts[:end] if end < len(parts) else parts, []).append(item)
    by_location: dict[Location, list[ErrorDetails]] = {}
    for found in by_value.values():
        best = max(map(_rank, found))
        for item in found:
            if _rank(item) == best:
                location = tuple(part for part in item["loc"] if not _is_branch(part))
                by_location.setdefault(location, []).append(item)
    return by_location


def _shorten(value: Any) -> str:
    if isinstance(value, dict | list):
        return type(value).__name__
    text = repr(value[: MAX_SHOWN_INPUT_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN_INPUT_CHARS else text[:MAX_SHOWN_INPUT_CHARS] + "..."


def from_validation(error: ValidationError) -> BadBody:
    """Say which field is wrong and how: at most ten, each with the start of its value."""
    items = error.errors(include_url=False, include_context=False)
    if items[0]["type"] == "json_invalid":
        return BadBody(f"the body is not JSON: {items[0]['msg'].removeprefix('Invalid JSON: ')}")
    problems = _most_telling(items)
    lines = []
    for location, found in list(problems.items())[:MAX_LISTED_ERRORS]:
        shown = "" if found[0]["type"] == "missing" else f" (got {_shorten(found[0]['input'])})"
        where = ".".join(map(str, location)) or "body"
        lines.append(f"{where}: {' or '.join(dict.fromkeys(item['msg'] for item in found))}{shown}")
    if len(problems) > MAX_LISTED_ERRORS:
        lines.append(f"and {len(problems) - MAX_LISTED_ERRORS} more")
    return BadBody("; ".join(lines), param=".".join(map(str, next(iter(problems)))) or None)
