"""What an operator may ask of a gateway and users may not: behind a key of its own, and refused where there is none.

Owns no state. An answer names every worker that was asked and what became of it; nothing that failed reads as done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
import grpc.aio
from starlette.requests import Request
from starlette.responses import Response

from core.errors import OverloadedError
from core.ids import WorkerId
from services.gateway.asgi import JsonResponse, bears_key
from services.gateway.http_errors import (
    Forbidden,
    ResetIncomplete,
    Unauthorized,
    error_body,
    shape_of,
)
from services.gateway.state import GatewayState
from services.rpc.channel import open_channel
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.status import error_of_status
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1.baton_pb2_grpc import WorkerStub

logger = logging.getLogger(__name__)

RESET_TIMEOUT_S = 10.0
"""How long a worker may take: its engine acts between two steps."""


class ResetStatus(StrEnum):
    """What became of a reset on one worker."""

    OK = "ok"
    UNREACHABLE = "unreachable"
    NOT_SUPPORTED = "not_supported"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ResetOutcome:
    """One worker's answer. num_kept_blocks: blocks that were in use and stay. message: why not `ok`."""

    worker_id: str
    status: ResetStatus
    num_kept_blocks: int = 0
    message: str = ""

    def described(self) -> dict[str, Any]:
        """As the client sees it."""
        told: dict[str, Any] = {"id": self.worker_id, "status": self.status.value}
        if self.status is ResetStatus.OK:
            return told | {"num_kept_blocks": self.num_kept_blocks}
        return told | {"message": self.message}


async def reset_prefix_cache(state: GatewayState, request: Request) -> Response:
    """Have every live worker drop what it has cached and does not use; 200 only when all did."""
    _check_admin(state, request)
    workers = state.directory.live_workers()
    if not workers:
        raise OverloadedError("no worker is ready yet: there is no cache to reset")
    outcomes = await asyncio.gather(
        *(_reset(worker.info.id, worker.connection.address) for worker in workers)
    )
    told = {"workers": [outcome.described() for outcome in outcomes]}
    error = _error_of(outcomes)
    if error is None:
        logger.info("prefix cache reset on %d workers", len(outcomes))
        return JsonResponse(told)
    logger.warning("%s", error)
    return JsonResponse(error_body(error) | told, status_code=shape_of(error).status)


def _check_admin(state: GatewayState, request: Request) -> None:
    admin_key = state.config.admin_api_key
    if not admin_key:
        raise Forbidden(
            "this gateway has no admin key, so nobody may do this: start it with --admin-api-key "
            "(or BATON_ADMIN_API_KEY)"
        )
    if not bears_key(request.scope, admin_key):
        raise Unauthorized("the Authorization header must be `Bearer` and the admin API key")


async def _reset(worker_id: WorkerId, address: str) -> ResetOutcome:
    request = pb.ResetPrefixCacheRequest(protocol_version=PROTOCOL_VERSION)
    try:
        async with open_channel(address) as channel:
            answer = await WorkerStub(channel).ResetPrefixCache(request, timeout=RESET_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        status, message = _why_not(error, address)
        return ResetOutcome(worker_id, status, message=message)
    return ResetOutcome(worker_id, ResetStatus.OK, answer.num_kept_blocks)


def _why_not(error: grpc.aio.AioRpcError, address: str) -> tuple[ResetStatus, str]:
    match error.code():
        case grpc.StatusCode.UNIMPLEMENTED:
            message = "this worker is of an earlier version that cannot reset its prefix cache"
            return ResetStatus.NOT_SUPPORTED, message
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return ResetStatus.UNREACHABLE, f"no answer within {RESET_TIMEOUT_S:g} s"
        case grpc.StatusCode.UNAVAILABLE:
            return ResetStatus.UNREACHABLE, error_of_status(error, address).message
        case _:
            return ResetStatus.FAILED, error_of_status(error, address).message


def _error_of(outcomes: Sequence[ResetOutcome]) -> ResetIncomplete | None:
    failed = [outcome for outcome in outcomes if outcome.status is not ResetStatus.OK]
    if not failed:
        return None
    named = ", ".join(f"{outcome.worker_id} ({outcome.status})" for outcome in failed)
    return ResetIncomplete(
        f"{len(failed)} of {len(outcomes)} workers have not reset their prefix cache: {named}"
    )
