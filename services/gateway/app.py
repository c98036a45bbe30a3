"""The HTTP application: which path is answered by what, and how errors leave.

Owns no state but a reference to the gateway's. Endpoints read their own bodies (limits, exact error messages), so
their schemas are given to OpenAPI by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from core.errors import ServeError
from services.gateway.admin import reset_prefix_cache
from services.gateway.asgi import ApiKeyGuard, JsonResponse, error_response
from services.gateway.health import health_report
from services.gateway.http_errors import (
    ClientGone,
    error_body,
    retry_after_s,
    shape_of,
    status_body,
)
from services.gateway.openai.endpoints import chat_completions, completions
from services.gateway.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from services.gateway.openai.text_endpoints import detokenize, list_models, show_model, tokenize
from services.gateway.openapi import admin_operation, describe_api, operation
from services.gateway.state import GatewayState
from services.gateway.version import version

logger = logging.getLogger(__name__)

Endpoint = Callable[[GatewayState, Request], Awaitable[Response]]


def create_app(state: GatewayState) -> FastAPI:
    """The application over a gateway's state."""
    app = FastAPI(title="Baton", version=version(), docs_url="/docs", redoc_url=None)
    _add_generation(app, state)
    _add_operations(app, state)
    _add_error_handlers(app, state)
    if state.config.api_key:
        app.add_middleware(ApiKeyGuard, api_key=state.config.api_key)
    app.openapi = lambda: describe_api(app)  # type: ignore[method-assign]
    return app


def _add_generation(app: FastAPI, state: GatewayState) -> None:
    def post(path: str, endpoint: Endpoint, extra: dict[str, Any]) -> None:
        async def handle(request: Request) -> Response:
            return await endpoint(state, request)

        app.post(path, openapi_extra=extra, summary=extra["summary"])(handle)

    post(
        "/v1/chat/completions",
        chat_completions,
        operation("Answer a conversation", ChatBody, streams=True),
    )
    post(
        "/v1/completions",
        completions,
        operation("Continue prompts", CompletionBody, streams=True),
    )
    post("/tokenize", tokenize, operation("Text or messages to token ids", TokenizeBody))
    post("/detokenize", detokenize, operation("Token ids to text", DetokenizeBody))

    @app.get("/v1/models", summary="Models that live workers serve")
    async def models() -> Response:
        return list_models(state)

    @app.get("/v1/models/{name:path}", summary="One model", openapi_extra=operation("One model"))
    async def model(name: str) -> Response:
        return show_model(state, name)


def _add_operations(app: FastAPI, state: GatewayState) -> None:
    async def health() -> Response:
        is_healthy, report = health_report(state)
        return JsonResponse(report, status_code=200 if is_healthy else 503)

    unavailable: dict[int | str, dict[str, Any]] = {503: {"description": "No worker can serve"}}
    for path, methods in (("/health", ["GET"]), ("/ready", ["GET"]), ("/ping", ["GET", "POST"])):
        for method in methods:
            app.add_api_route(
                path,
                health,
                methods=[method],
                summary="Whether a worker can serve",
                responses=unavailable,
                operation_id=f"{method.lower()}_{path[1:]}",
            )

    @app.get("/version", summary="The version of this gateway")
    async def show_version() -> Response:
        return JsonResponse({"version": version()})

    @app.get("/load", summary="Prompts being served")
    async def load() -> Response:
        return JsonResponse({"server_load": state.num_inflight})

    @app.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(state.render_metrics(), media_type=CONTENT_TYPE_LATEST)

    described = admin_operation("Drop what workers have cached and do not use")

    @app.post("/reset_prefix_cache", summary=described["summary"], openapi_extra=described)
    async def reset(request: Request) -> Response:
        return await reset_prefix_cache(state, request)


def _add_error_handlers(app: FastAPI, state: GatewayState) -> None:
    async def serve_error(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            state.metrics.disconnects.inc()
        body = error_body(error)
        state.metrics.rejected.labels(body["error"]["code"] or "none").inc()
        if shape_of(error).status >= 500:
            logger.warning("%s %s: %s", request.method, request.url.path, error)
        return error_response(error, retry_after_s(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JsonResponse(
            status_body(error.status_code, str(error.detail)),
            status_code=error.status_code,
            headers=dict(error.headers or {}),
        )

    async def mistake(request: Request, error: Exception) -> Response:
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
        return error_response(error)

    app.add_exception_handler(ServeError, serve_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, mistake)
