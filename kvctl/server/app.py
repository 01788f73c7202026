"""The ASGI application: which path is answered by which function, and how every failure becomes an answer.

Knows no engine internals. The endpoints are ASGI applications of our own under FastAPI's router: bodies are read
with bounds, answers are sent without a validation of what we built ourselves. FastAPI gives routing, /docs and
/openapi.json. Floor 3.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvctl import __version__
from kvctl.errors import KvctlError
from kvctl.server import info, tokenization
from kvctl.server.auth import ApiKeyGuard
from kvctl.server.chat import create_chat_completion
from kvctl.server.completions import create_completion
from kvctl.server.context import ServingContext
from kvctl.server.errors import ClientDisconnected, error_response, http_error
from kvctl.server.openapi import build_document
from kvctl.server.protocol import ChatCompletionRequest, CompletionRequest
from kvctl.server.request_id import RequestIdHeader

Handler = Callable[[ServingContext, Request], Awaitable[Response]]
BodyHandler = Callable[[ServingContext, Request, Any], Awaitable[Response]]  # the last one is the body's model
logger = logging.getLogger(__name__)


class Endpoint:
    """A handler as an ASGI application: its exceptions become answers."""

    def __init__(self, context: ServingContext, handler: Handler) -> None:
        self._context = context
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with ExitStack() as until_answered:
            response = await self._answer(Request(scope, receive, send), until_answered)
            if response is not None:
                await response(scope, receive, send)

    async def _answer(self, request: Request, until_answered: ExitStack) -> Response | None:
        try:
            return await self._handle(request, until_answered)
        except ClientDisconnected:
            return None
        except KvctlError as error:
            return error_response(error)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.url.path)
            return error_response(error)

    async def _handle(self, request: Request, until_answered: ExitStack) -> Response:
        return await self._handler(self._context, request)


class GenerationEndpoint(Endpoint):
    """An endpoint whose requests count as in flight, from the end of their body to the last byte of their answer.

    Before that they only cost the client: one that sends its body slowly keeps nobody out.
    """

    def __init__(self, context: ServingContext, model: type[BaseModel], handler: BodyHandler) -> None:
        self._context = context
        self._model = model
        self._generate = handler

    async def _handle(self, request: Request, until_answered: ExitStack) -> Response:
        context = self._context
        context.admission.check()  # before a body is read that will not be served
        body = await context.bodies.read_json(request, self._model)
        until_answered.enter_context(context.admission.one_more())
        return await self._generate(context, request, body)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return http_error(error.status_code, str(error.detail), dict(error.headers or {}))


def build_app(context: ServingContext) -> ASGIApp:
    """Build the whole application over one engine."""
    options = context.options
    app = FastAPI(
        title="kvctl serve",
        version=__version__,
        description="An OpenAI-compatible server over a paged KV cache.",
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(HTTPException, _http_exception)
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(build_document(app))
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to replace it
    generation: dict[str, tuple[type[BaseModel], BodyHandler]] = {
        "/v1/completions": (CompletionRequest, create_completion),
        "/v1/chat/completions": (ChatCompletionRequest, create_chat_completion),
    }
    posts: dict[str, Handler] = {
        "/tokenize": tokenization.tokenize,
        "/detokenize": tokenization.detokenize,
        "/ping": info.ping,
    }
    gets: dict[str, Handler] = {
        "/v1/models": info.models,
        "/v1/models/{model_id:path}": info.one_model,
        "/health": info.health,
        "/version": info.version,
        "/load": info.load,
        "/metrics": info.metrics,
    }
    routes = [Route(p, GenerationEndpoint(context, *how), methods=["POST"]) for p, how in generation.items()]
    for path, handler in posts.items():
        methods = ["POST", "GET"] if path == "/ping" else ["POST"]
        routes.append(Route(path, Endpoint(context, handler), methods=methods))
    routes += [Route(path, Endpoint(context, handler), methods=["GET"]) for path, handler in gets.items()]
    app.router.routes[:0] = routes
    whole: ASGIApp = ApiKeyGuard(app, options.api_keys) if options.api_keys else app
    if options.allowed_origins:  # around the guard: browsers may read its 401 too
        whole = CORSMiddleware(
            whole,
            allow_origins=list(options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            allow_credentials=False,
        )
    return RequestIdHeader(whole) if options.request_id_headers else whole
