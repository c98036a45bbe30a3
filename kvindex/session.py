"""A worker's membership in the index: its record, its lease, its reports, its events.

Owns two loops in the event loop of the worker's front: one keeps the lease, the other (EventPublisher) sends events.
Promises that the worker comes back by itself after Redis was away or came back empty, and that nothing raises into the
caller. A worker that has nothing to report (its engine fell silent) does not renew its lease: no heartbeat, no
candidate.

    UNREGISTERED --register--> MEMBER --heartbeat unknown--> UNREGISTERED
    any --register answers superseded--> SUPERSEDED (another process took the name: final, said loudly)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.events import CacheEvent
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.base import IndexUnavailable, PrefixIndex, RegisterResult
from kvindex.config import IndexConfig
from kvindex.publisher import EventPublisher, PublisherCounters, TakeSnapshot

_logger = logging.getLogger(__name__)

ReadLoad = Callable[[], WorkerLoad | None]
"""The worker's load now; None when the engine is silent, so that there is nothing true to report."""

_LEAST_REPORT_INTERVAL_S = 0.05


@dataclass(slots=True)
class SessionCounters:
    """Counts since the session was made, and two gauges (the last two), for metrics.

    registrations_total: times the entry was made anew.
    heartbeats_total: reports that the index took.
    failures_total: calls that the index did not answer.
    is_connected: whether the last call was answered.
    is_superseded: whether another process holds this worker's name.
    """

    registrations_total: int = 0
    heartbeats_total: int = 0
    failures_total: int = 0
    is_connected: bool = False
    is_superseded: bool = False


class WorkerSession:
    """One worker#epoch in the index, from `run` to `leave`."""

    def __init__(
        self,
        index: PrefixIndex,
        info: WorkerInfo,
        read_load: ReadLoad,
        take_snapshot: TakeSnapshot,
        config: IndexConfig,
    ) -> None:
        self._index = index
        self._info = info
        self._read_load = read_load
        self._config = config
        self._is_member = False
        self._report_now = asyncio.Event()
        self._publisher = EventPublisher(
            index, info.id, info.epoch, take_snapshot, config, self._lose_membership
        )
        self.counters = SessionCounters()

    @property
    def publisher_counters(self) -> PublisherCounters:
        """What became of the cache events."""
        return self._publisher.counters

    def accept(self, first_event_number: int, events: Sequence[CacheEvent]) -> None:
        """Take over the engine's cache events. Neither blocks nor raises."""
        self._publisher.accept(first_event_number, events)

    def report_now(self) -> None:
        """Send the next report soon instead of at its time: something changed that gateways should know."""
        self._report_now.set()

    def update_info(self, info: WorkerInfo) -> None:
        """Publish a changed record of the same worker#epoch (rates measured, adapters loaded)."""
        self._info = info
        self._lose_membership()

    async def run(self) -> None:
        """Keep lease and events going until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._keep_lease())
            loops.create_task(self._publisher.run())

    async def leave(self) -> None:
        """Take the worker out of the index, if it can be reached; its lease ends in any case. After `run` has ended."""
        try:
            await self._index.deregister(self._info.id, self._info.epoch)
        except IndexUnavailable as error:
            _logger.warning("worker %s: left without saying so: %s", self._info.id, error.message)
        self._is_member = False
        self.counters.is_connected = False

    def _lose_membership(self) -> None:
        self._is_member = False
        self._report_now.set()

    async def _keep_lease(self) -> None:
        while not self.counters.is_superseded:
            try:
                await self._renew()
            except IndexUnavailable as error:
                self._note_failure(error)
                await asyncio.sleep(self._config.retry_interval_ms / 1000)
            else:
                self._note_success()
                await self._wait_for_next_report()

    async def _renew(self) -> None:
        self._report_now.clear()
        if not self._is_member:
            await self._register()
        load = self._read_load()
        if load is None or not self._is_member:
            return
        if await self._index.heartbeat(
            self._info.id, self._info.epoch, load, self._config.lease_ms
        ):
            self.counters.heartbeats_total += 1
        else:
            self._lose_membership()

    async def _register(self) -> None:
        self._is_member = True  # update_info during the call asks for another one
        try:
            result = await self._index.register(self._info, self._config.lease_ms)
        except IndexUnavailable:
            self._is_member = False
            raise
        if result is RegisterResult.SUPERSEDED:
            self._is_member = False
            self.counters.is_superseded = True
            _logger.error(
                "worker %s: another process took this name; epoch %d is out of the index for good",
                self._info.id,
                self._info.epoch,
            )
            return
        self.counters.registrations_total += result is RegisterResult.FRESH
        self._publisher.resume()

    async def _wait_for_next_report(self) -> None:
        interval_s = self._config.heartbeat_interval_ms / 1000
        least_s = min(_LEAST_REPORT_INTERVAL_S, interval_s)
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            # Not wait_for: before Python 3.12 it can lose a cancellation that meets the timeout.
            async with asyncio.timeout(interval_s - least_s):
                await self._report_now.wait()

    def _note_success(self) -> None:
        if not self.counters.is_connected:
            _logger.info("worker %s: in the index", self._info.id)
        self.counters.is_connected = True

    def _note_failure(self, error: IndexUnavailable) -> None:
        if self.counters.is_connected:
            _logger.warning("worker %s: index lost: %s", self._info.id, error.message)
        self.counters.is_connected = False
        self.counters.failures_total += 1
