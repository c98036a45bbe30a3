"""Who drives the legs of a routed request: the seam.

A driver takes a route and a request and gives back one ActiveRequest, whose outputs arrive in order, each exactly
once, until every choice has ended. Today the decode worker owns all legs (`decode_owned`); a driver that calls
prefill and decode itself, for fleets of other engines, fits behind the same two verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.request import Request
from core.worker_info import WorkerInfo
from services.rpc.v1 import baton_pb2 as pb


class ActiveRequest(Protocol):
    """One submitted request, read by one task."""

    async def receive(self) -> Sequence[pb.ChoiceOutput]:
        """The outputs that came since the last call, at least one.

        Raises WorkerLostError when the owner is gone, DeadlineExceeded when time is up, and what `fail` was given.
        """
        ...

    def fail(self, error: Exception) -> None:
        """Make `receive` raise, now and ever after; the worker is told to stop."""
        ...

    def close(self, reason: str) -> None:
        """Nobody reads on: the worker is told to stop unless all choices ended. Idempotent."""
        ...


class LegsDriver(Protocol):
    """Runs requests on the workers that a route names."""

    def start(
        self, request: Request, owner: WorkerInfo, prefill: Sequence[WorkerInfo]
    ) -> ActiveRequest:
        """Submit the request; WorkerLostError when the owner cannot be reached now."""
        ...
