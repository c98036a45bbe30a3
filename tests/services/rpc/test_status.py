"""Errors cross a process boundary as themselves."""

import inspect

import grpc
import grpc.aio
import pytest

from core import errors
from core.errors import RequestError, ServeError
from services.rpc.protocol import check_version
from services.rpc.status import (
    error_kind,
    error_of_kind,
    error_of_status,
    status_code,
    trailing_metadata,
)

TREE = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ServeError)
]


def status_of(error: Exception) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailing_metadata(error))
    return grpc.aio.AioRpcError(status_code(error), grpc.aio.Metadata(), metadata, str(error))


@pytest.mark.parametrize("kind", TREE)
def test_every_error_of_the_tree_comes_back_as_itself(kind: type[ServeError]) -> None:
    error = kind("what happened")
    back = error_of_status(status_of(error), "w")
    assert type(back) is kind
    assert back.message == "what happened"
    assert status_code(error) is not grpc.StatusCode.OK


def test_the_field_at_fault_crosses_too() -> None:
    back = error_of_status(status_of(errors.InvalidRequest("no", param="größe")), "w")
    assert isinstance(back, RequestError)
    assert back.param == "größe"


def test_a_status_without_a_name_means_that_the_worker_is_lost() -> None:
    status = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "refused"
    )
    back = error_of_status(status, "w:1")
    assert type(back) is errors.WorkerLostError
    assert "w:1" in back.message


def test_what_is_not_in_the_tree_is_a_plain_error() -> None:
    assert error_kind(ValueError("x")) == "ServeError"
    assert status_code(ValueError("x")) is grpc.StatusCode.INTERNAL
    assert type(error_of_kind("FromTheFuture", "x")) is ServeError


@pytest.mark.parametrize("version", [0, 1, 2])
def test_versions_one_apart_serve_together(version: int) -> None:
    check_version(version, "peer")


def test_versions_further_apart_are_refused_by_name() -> None:
    with pytest.raises(errors.ProtocolMismatch, match="gateway 'g' speaks protocol version 3"):
        check_version(3, "gateway 'g'")
