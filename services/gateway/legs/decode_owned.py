"""The driver of Baton's own workers: the decode worker owns a request from admission to its last token.

The gateway submits once, with the prefill workers to ask in order; everything else (asking, falling back, relaying
the first token) is the owner's affair. So there is one place where a request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.errors import WorkerLostError
from core.ids import WorkerId
from core.request import Request
from core.worker_info import WorkerInfo
from services.gateway.legs.base import ActiveRequest
from services.gateway.legs.connection import WorkerConnection


class DecodeOwnedDriver:
    """Submits each request on its owner's stream."""

    def __init__(self, connection_of: Callable[[WorkerId], WorkerConnection | None]) -> None:
        self._connection_of = connection_of

    def start(
        self, request: Request, owner: WorkerInfo, prefill: Sequence[WorkerInfo]
    ) -> ActiveRequest:
        """See LegsDriver."""
        connection = self._connection_of(owner.id)
        if connection is None:
            raise WorkerLostError(f"worker {owner.id} is not connected")
        return connection.submit(request, prefill)
