"""Errors as gRPC statuses and back: the one place where core/errors.py meets gRPC.

A status carries the class name and the request field at fault in trailing metadata, so that the
other side raises the same error. What is not in the tree (our own mistakes) crosses as INTERNAL and
comes back as plain ServeError.
"""

from __future__ import annotations

from typing import NoReturn

import grpc
import grpc.aio

from core import errors
from core.errors import RequestError, ServeError

KIND_KEY = "baton-error-kind"
PARAM_KEY = "baton-error-param-bin"

_CODES: dict[type[ServeError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NoCapacity: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PeerLost: grpc.StatusCode.UNAVAILABLE,
    errors.ChecksumMismatch: grpc.StatusCode.DATA_LOSS,
    errors.TransferTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.TransferError: grpc.StatusCode.ABORTED,
    errors.WorkerLostError: grpc.StatusCode.UNAVAILABLE,
    errors.EngineDeadError: grpc.StatusCode.UNAVAILABLE,
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelLoadError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ServeError: grpc.StatusCode.INTERNAL,
}

_KINDS: dict[str, type[ServeError]] = {kind.__name__: kind for kind in _CODES}


def error_kind(error: Exception) -> str:
    """The name under which an error crosses processes: its class, or `ServeError` for what is not
    in the tree.
    """
    name = type(error).__name__
    return name if name in _KINDS else ServeError.__name__


def error_of_kind(kind: str, message: str, param: str | None = None) -> ServeError:
    """The error that another process named; a kind unknown here is a plain ServeError."""
    error_type = _KINDS.get(kind, ServeError)
    if issubclass(error_type, RequestError):
        return error_type(message, param=param)
    return error_type(message)


def status_code(error: Exception) -> grpc.StatusCode:
    """The gRPC status of an error."""
    return _CODES.get(_KINDS[error_kind(error)], grpc.StatusCode.INTERNAL)


def trailing_metadata(error: Exception) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata from which `error_of_status` builds the same error again."""
    metadata: list[tuple[str, str | bytes]] = [(KIND_KEY, error_kind(error))]
    if isinstance(error, RequestError) and error.param is not None:
        metadata.append((PARAM_KEY, error.param.encode()))
    return tuple(metadata)


async def abort_with(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """End a call with this error's status."""
    await context.abort(status_code(error), str(error), trailing_metadata(error))
    raise AssertionError("abort returned")


def error_of_status(error: grpc.aio.AioRpcError, peer: str) -> ServeError:
    """The error behind a failed call to `peer`: the one that peer named, or WorkerLostError when it
    named none.
    """
    # Metadata iterates over pairs, yet has keys(): dict() alone would take it for a mapping.
    metadata = dict(list(error.trailing_metadata() or ()))
    kind = metadata.get(KIND_KEY)
    message = error.details() or error.code().name
    if kind is None:
        return errors.WorkerLostError(f"{peer}: {message}")
    param = metadata.get(PARAM_KEY)
    return error_of_kind(str(kind), message, param.decode() if isinstance(param, bytes) else None)
