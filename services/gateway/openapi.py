"""The OpenAPI description: schemas of bodies that endpoints read themselves, error responses, event streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

_TEMPLATE = "#/components/schemas/{model}"
_ERRORS = {
    "400": "A field has a value that cannot be served; the error names it",
    "401": "No valid API key",
    "404": "No worker serves the named model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not plain JSON",
    "429": "No room now",
    "500": "Internal error",
    "503": "No worker can serve now",
    "504": "The request's time ran out",
}
_ADMIN_ERRORS = {
    "401": "No valid admin key",
    "403": "This gateway has no admin key (--admin-api-key)",
    "502": "Not every worker did it; `workers` says what became of each",
    "503": "No worker is ready",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def operation(
    summary: str, body: type[BaseModel] | None = None, *, streams: bool = False
) -> dict[str, Any]:
    """What OpenAPI says of an operation beyond its path."""
    described: dict[str, Any] = {"summary": summary, "responses": _responses(streams)}
    if body is not None:
        schema = {"$ref": _TEMPLATE.format(model=body.__name__)}
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return described


def admin_operation(summary: str) -> dict[str, Any]:
    """What OpenAPI says of an operation behind the admin key, which takes no body."""
    return {"summary": summary, "responses": _responses(False, _ADMIN_ERRORS)}


def describe_api(app: FastAPI) -> dict[str, Any]:
    """The description of the whole API, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        components["Error"] = _ERROR_SCHEMA
        bodies = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
        _, definitions = models_json_schema(
            [(body, "validation") for body in bodies], ref_template=_TEMPLATE
        )
        components.update(definitions.get("$defs", {}))
        app.openapi_schema = schema
    return app.openapi_schema


def _responses(streams: bool, errors: Mapping[str, str] = _ERRORS) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    error = {"application/json": {"schema": {"$ref": _TEMPLATE.format(model="Error")}}}
    for status, text in errors.items():
        responses[status] = {"description": text, "content": error}
    return responses
