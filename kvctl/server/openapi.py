"""The OpenAPI document: request bodies from the pydantic models, answers and errors by hand.

Knows the shapes only. The routes read their bodies themselves (`body.py`), so FastAPI cannot see them. Floor 3.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from kvctl.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

Schema = dict[str, Any]
_REF = "#/components/schemas/"


def _object(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split() or list(properties), "properties": properties}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_IDS = _array(_INTEGER)
# of one server-sent event: its data is a chunk as JSON, an error object as JSON, or [DONE]
_EVENT: Schema = {"type": "object", "required": ["data"], "properties": {"data": _TEXT}}

_ANSWERS: dict[str, Schema] = {
    "Error": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_nullable("string"), code=_INTEGER),
    ),
    "Usage": _object(
        prompt_tokens=_INTEGER,
        completion_tokens=_INTEGER,
        total_tokens=_INTEGER,
        prompt_tokens_details=_object(cached_tokens=_INTEGER),
    ),
    "Completion": _object(
        id=_TEXT,
        object={"const": "text_completion"},
        created=_INTEGER,
        model=_TEXT,
        choices=_array(
            _object(
                "index text finish_reason",
                index=_INTEGER,
                text=_TEXT,
                logprobs=_nullable("object"),
                finish_reason=_nullable("string"),
                stop_reason={"type": ["string", "integer", "null"]},
            )
        ),
        usage={"$ref": _REF + "Usage"},
    ),
    "ChatCompletion": _object(
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_INTEGER,
        model=_TEXT,
        choices=_array(
            _object(
                "index message finish_reason",
                index=_INTEGER,
                message=_object("role content", role=_TEXT, content=_nullable("string")),
                logprobs=_nullable("object"),
                finish_reason=_nullable("string"),
                stop_reason={"type": ["string", "integer", "null"]},
            )
        ),
        usage={"$ref": _REF + "Usage"},
    ),
    "ModelCard": _object(
        id=_TEXT, object={"const": "model"}, created=_INTEGER, owned_by=_TEXT, root=_TEXT, max_model_len=_INTEGER
    ),
    "Models": _object(object={"const": "list"}, data=_array({"$ref": _REF + "ModelCard"})),
    "Tokens": _object("count max_model_len tokens", count=_INTEGER, max_model_len=_INTEGER, tokens=_IDS),
    "Text": _object(prompt=_TEXT),
    "Health": _object("status reason is_alive", status=_TEXT, reason=_nullable("string"), is_alive={"type": "boolean"}),
    "Version": _object(version=_TEXT),
    "Load": _object(server_load=_INTEGER),
    "Pong": {"type": "object"},
}
_BODIES = (
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeCompletionRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)


def _json_content(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": _REF + name}}}


def _answer(description: str, name: str) -> Schema:
    return {"description": description, "content": _json_content(name)}


def _responses(name: str, *, stream: bool = False, errors: str = "") -> Schema:
    content = _json_content(name)
    if stream:
        content["text/event-stream"] = {"schema": _EVENT}
    responses: Schema = {"200": {"description": "OK", "content": content}}
    for status in errors.split():
        responses[status] = _answer(_ERROR_TEXTS[status], "Error")
    return responses


_ERROR_TEXTS = {
    "400": "The request cannot be served: the message says why, param names the field.",
    "404": "No such model.",
    "405": "No such method here.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "500": "The server failed on this request.",
    "501": "A field that is not served here.",
    "503": "Too many requests are in flight, the server ends, or the engine is dead.",
}
_UNAUTHORIZED: Schema = {
    "description": "The API key is missing or wrong.",
    "content": {"application/json": {"schema": _object(error=_TEXT)}},
}
_GENERATION_ERRORS = "400 404 405 408 413 500 501 503"


def _operation(summary: str, responses: Schema, bodies: tuple[str, ...] = (), *, guarded: bool = False) -> Schema:
    operation: Schema = {"summary": summary, "responses": responses}
    if bodies:
        refs = [{"$ref": _REF + name} for name in bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if guarded:
        responses["401"] = _UNAUTHORIZED
        operation["security"] = [{}, {"apiKey": []}]
    return operation


def _paths() -> Schema:
    metrics = {"200": {"description": "OK", "content": {"text/plain": {"schema": _TEXT}}}}
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": _TEXT}
    one_model = _operation("One served model", _responses("ModelCard", errors="404 405"), guarded=True)
    return {
        "/v1/models": {"get": _operation("The served models", _responses("Models", errors="405"), guarded=True)},
        "/v1/models/{model_id}": {"get": one_model | {"parameters": [model_id]}},
        "/v1/completions": {
            "post": _operation(
                "Complete a prompt",
                _responses("Completion", stream=True, errors=_GENERATION_ERRORS),
                ("CompletionRequest",),
                guarded=True,
            )
        },
        "/v1/chat/completions": {
            "post": _operation(
                "Answer a conversation",
                _responses("ChatCompletion", stream=True, errors=_GENERATION_ERRORS),
                ("ChatCompletionRequest",),
                guarded=True,
            )
        },
        "/tokenize": {
            "post": _operation(
                "Turn a text or a conversation into token ids",
                _responses("Tokens", errors="400 404 405 408 413 500 501"),
                ("TokenizeCompletionRequest", "TokenizeChatRequest"),
            )
        },
        "/detokenize": {
            "post": _operation(
                "Turn token ids into text",
                _responses("Text", errors="400 404 405 408 413 500"),
                ("DetokenizeRequest",),
            )
        },
        "/health": {
            "get": _operation(
                "Whether the engine is alive, and what it runs on",
                {
                    "200": _answer("Alive", "Health"),
                    "405": _answer(_ERROR_TEXTS["405"], "Error"),
                    "503": _answer("Dead, stalled, or shutting down", "Health"),
                },
            )
        },
        "/ping": {
            method: _operation(
                "As /health, without details",
                {
                    "200": _answer("Alive", "Pong"),
                    "405": _answer("No such method here.", "Error"),
                    "503": _answer("Dead, stalled, or shutting down", "Pong"),
                },
            )
            for method in ("get", "post")
        },
        "/version": {"get": _operation("The version", _responses("Version", errors="405"))},
        "/load": {"get": _operation("How many requests are in flight", _responses("Load", errors="405"))},
        "/metrics": {"get": _operation("Prometheus metrics", metrics | _responses_405())},
    }


def _responses_405() -> Schema:
    return {"405": _answer(_ERROR_TEXTS["405"], "Error")}


def build_document(app: FastAPI) -> Schema:
    """Build the OpenAPI document of the server."""
    document: Schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=[])
    _, definitions = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REF + "{model}")
    document["paths"] = _paths()
    document["components"] = {
        "schemas": definitions["$defs"] | _ANSWERS,
        "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
    }
    return document
