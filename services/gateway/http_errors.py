"""The one place where the error tree meets HTTP: status, type and code of an OpenAI error body.

What is not in the tree is our own mistake: the client sees `internal error`, the log sees the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core import errors
from core.errors import RequestError, ServeError


class BodyTooLarge(RequestError):
    """The request body is larger than the gateway takes."""


class BodyTimeout(RequestError):
    """The client took too long to send its request body."""


class UnsupportedMedia(RequestError):
    """The request body is not declared as plain JSON."""


class Unauthorized(RequestError):
    """The request bears no valid API key."""


class Forbidden(RequestError):
    """The request asks for what this gateway is not set up to let anybody do."""


class ResetIncomplete(ServeError):
    """Not every worker has dropped its cache."""


class UnsupportedParameter(RequestError):
    """A field asks for something this server does not do."""


class TooManyRequests(errors.NoCapacity):
    """This gateway serves as many requests as it may."""


class ClientGone(ServeError):
    """The client closed its connection: nobody reads the answer."""


@dataclass(frozen=True, slots=True)
class HttpShape:
    """How one kind of error looks to a client."""

    status: int
    type: str
    code: str | None


_SHAPES: dict[type[ServeError], HttpShape] = {
    UnsupportedParameter: HttpShape(400, "BadRequestError", "unsupported_parameter"),
    errors.ContextTooLong: HttpShape(400, "BadRequestError", "context_length_exceeded"),
    errors.ModelNotFound: HttpShape(404, "NotFoundError", "model_not_found"),
    Unauthorized: HttpShape(401, "AuthenticationError", "invalid_api_key"),
    Forbidden: HttpShape(403, "PermissionDeniedError", "admin_key_not_set"),
    BodyTimeout: HttpShape(408, "TimeoutError", "request_timeout"),
    BodyTooLarge: HttpShape(413, "BadRequestError", "body_too_large"),
    UnsupportedMedia: HttpShape(415, "BadRequestError", "unsupported_media_type"),
    RequestError: HttpShape(400, "BadRequestError", "invalid_value"),
    errors.NoCapacity: HttpShape(429, "RateLimitError", "no_capacity"),
    errors.DeadlineExceeded: HttpShape(504, "TimeoutError", "deadline_exceeded"),
    errors.OverloadedError: HttpShape(503, "ServiceUnavailableError", "service_unavailable"),
    errors.WorkerLostError: HttpShape(503, "ServiceUnavailableError", "worker_lost"),
    errors.EngineDeadError: HttpShape(503, "ServiceUnavailableError", "engine_dead"),
    ResetIncomplete: HttpShape(502, "BadGatewayError", "reset_incomplete"),
    ClientGone: HttpShape(499, "ClientClosedRequest", "client_closed_request"),
}

_INTERNAL = HttpShape(500, "InternalServerError", "internal_error")
INTERNAL_MESSAGE = "internal error"

_BY_STATUS: dict[int, HttpShape] = {
    404: HttpShape(404, "NotFoundError", "not_found"),
    405: HttpShape(405, "BadRequestError", "method_not_allowed"),
}


def shape_of(error: Exception) -> HttpShape:
    """The shape of the nearest class in the error's ancestry."""
    for kind in type(error).__mro__:
        shape = _SHAPES.get(kind)
        if shape is not None:
            return shape
    return _INTERNAL


def error_body(error: Exception) -> dict[str, Any]:
    """The OpenAI error body of an error."""
    shape = shape_of(error)
    is_ours = isinstance(error, ServeError)
    message = str(error) if is_ours else INTERNAL_MESSAGE
    param = error.param if isinstance(error, RequestError) else None
    return _body(message, shape, param)


def status_body(status: int, message: str) -> dict[str, Any]:
    """The OpenAI error body of an HTTP status that the framework itself gives (no such path, wrong method)."""
    shape = _BY_STATUS.get(status, HttpShape(status, "BadRequestError", None))
    return _body(message, shape, None)


def retry_after_s(error: Exception) -> int | None:
    """Seconds after which a client may try again, for errors that pass."""
    return 1 if shape_of(error).status in (429, 503) else None


def _body(message: str, shape: HttpShape, param: str | None) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": shape.type,
            "param": param,
            "code": shape.code,
        }
    }
