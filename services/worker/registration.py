"""The worker's place in the index: what the engine says goes there, and nothing comes back.

Without a redis_url there is no index, and gateways find the worker by its seed address. The index
being away is no concern of the worker's: kvindex comes back to it by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from core.worker_info import WorkerInfo, WorkerLoad
from engine.messages import StepDone
from kvindex.base import CacheSnapshot, PrefixIndex
from kvindex.config import IndexConfig
from kvindex.connect import connect_index
from kvindex.session import WorkerSession
from services.worker.snapshots import Snapshots

_log = logging.getLogger(__name__)


class Registration:
    """One worker#epoch in the index, from `start` to `close`."""

    def __init__(
        self,
        config: IndexConfig,
        info: WorkerInfo,
        snapshots: Snapshots,
        is_engine_heard: Callable[[], bool],
    ) -> None:
        """is_engine_heard: while False no load is reported, so that the lease runs out."""
        self._snapshots = snapshots
        self._load = WorkerLoad(num_free_blocks=info.num_blocks)
        self._task: asyncio.Task[None] | None = None
        self._index: PrefixIndex | None = None
        self._session: WorkerSession | None = None
        if config.redis_url:
            self._index = connect_index(config)
            self._session = WorkerSession(
                self._index,
                info,
                lambda: self._load if is_engine_heard() else None,
                self._take_snapshot,
                config,
            )

    @property
    def is_connected(self) -> bool:
        """Whether the index answered the last call; False without an index."""
        return self._session is not None and self._session.counters.is_connected

    @property
    def is_in_step(self) -> bool:
        """Whether the index had every cache event when last asked; False without an index."""
        return self._session is not None and self._session.publisher_counters.is_in_step

    def start(self) -> None:
        """Join the index, now or as soon as it can be reached."""
        if self._session is not None:
            self._task = asyncio.create_task(self._session.run(), name="registration")
            self._task.add_done_callback(_log_failure)

    def note_step(self, step: StepDone, load: WorkerLoad) -> None:
        """Pass the step's cache events on, and the load with its requests named; a report goes out
        soon where it names other ones.
        """
        if self._session is None:
            return
        names_changed = load.named_request_ids != self._load.named_request_ids
        self._load = load
        self._session.accept(step.first_event_number, step.events)
        if names_changed:
            self._session.report_now()

    async def close(self) -> None:
        """Leave the index, if it can be reached. Idempotent."""
        if self._session is None or self._index is None:
            return
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._session.leave()
        await self._index.close()
        self._session = self._index = None

    async def _take_snapshot(self) -> CacheSnapshot:
        taken = await self._snapshots.take()
        return CacheSnapshot(taken.sequence_number, taken.hashes)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("registration ended by its own fault", exc_info=task.exception())
