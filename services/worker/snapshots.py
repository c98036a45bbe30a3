"""Snapshots of what the engine has published, for readers that saw a gap in its events; and the end of all that is
cached, which a snapshot confirms.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from core.errors import ServeError
from engine.messages import ResetPrefixCache, SnapshotTaken, TakeSnapshot, ToEngine


class Snapshots:
    """Asks the engine and matches its answers to the questions. send: hands a message to the
    engine.
    """

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._query_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[SnapshotTaken]] = {}

    async def take(self) -> SnapshotTaken:
        """Every published block, as of one event number; raises the error that ended the engine."""
        query_id = next(self._query_ids)
        future: asyncio.Future[SnapshotTaken] = asyncio.get_running_loop().create_future()
        self._waiting[query_id] = future
        try:
            self._send(TakeSnapshot(query_id))
            return await future
        finally:
            del self._waiting[query_id]

    async def reset(self) -> SnapshotTaken:
        """Have everything cached and unused dropped; what is left, taken by the engine right after it did so.

        The engine acts on messages in their order, so its answer to the second one says that it is done with the first.
        """
        self._send(ResetPrefixCache())
        return await self.take()

    def handle(self, message: SnapshotTaken) -> None:
        """Answer the question that this message belongs to, if anybody still waits."""
        future = self._waiting.get(message.query_id)
        if future is not None and not future.done():
            future.set_result(message)

    def fail(self, error: ServeError) -> None:
        """Nobody gets an answer any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
