"""The endpoints that tell about the server: models, health, version, load, metrics. Floor 3."""

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvctl import __version__
from kvctl.metrics.recorder import CONTENT_TYPE
from kvctl.server.context import ServingContext
from kvctl.server.errors import json_response

_RETRY = {"Retry-After": "5"}


def _model_card(context: ServingContext, name: str) -> dict[str, Any]:
    model = context.model
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "kvctl",
        "root": model.root,
        "parent": None,
        "max_model_len": context.limits.max_model_len,
        "permission": [],
    }


async def models(context: ServingContext, http: Request) -> Response:
    """GET /v1/models."""
    cards = [_model_card(context, name) for name in context.model.names]
    return json_response({"object": "list", "data": cards})


async def one_model(context: ServingContext, http: Request) -> Response:
    """GET /v1/models/NAME; 404 for an unknown one."""
    return json_response(_model_card(context, context.model.check(http.path_params["model_id"])))


def _status(context: ServingContext) -> tuple[str, str | None]:
    """The state in a word, and in a sentence where it is not "ok"."""
    if not context.engine.is_alive:
        return "dead", "the engine process has ended"
    stall = context.engine.stall
    if stall is not None:
        return "stalled", stall
    return ("draining", "the server is shutting down") if context.is_draining else ("ok", None)


async def health(context: ServingContext, http: Request) -> Response:
    """GET /health: 200 while requests are taken and served, 503 otherwise; with what the engine runs on."""
    status, reason = _status(context)
    body = {
        "status": status,
        "reason": reason,
        "is_alive": context.engine.is_alive,
        "in_flight": context.admission.in_flight,
        "engine": dataclasses.asdict(context.engine.info),
    }
    return json_response(body) if status == "ok" else json_response(body, 503, _RETRY)


async def ping(context: ServingContext, http: Request) -> Response:
    """GET or POST /ping: /health without details."""
    return json_response({}) if _status(context)[0] == "ok" else json_response({}, 503, _RETRY)


async def version(context: ServingContext, http: Request) -> Response:
    """GET /version."""
    return json_response({"version": __version__})


async def load(context: ServingContext, http: Request) -> Response:
    """GET /load: requests in flight."""
    return json_response({"server_load": context.admission.in_flight})


async def metrics(context: ServingContext, http: Request) -> Response:
    """GET /metrics: Prometheus text."""
    return Response(context.metrics.render(), headers={"content-type": CONTENT_TYPE})
