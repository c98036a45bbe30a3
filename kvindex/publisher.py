"""A worker's cache events on their way to the index.

Owns the queue between the engine, which must never wait, and Redis, which may be slow, away or empty. Lives in the
event loop of the worker's front.

    PAUSED --entry registered--> SENDING --gap, overflow, lost number--> SNAPSHOT --replaced--> SENDING
    any --index does not know this epoch--> PAUSED (the session is told, registers, and calls `resume`)

Promises: `accept` neither blocks nor raises; the queue is bounded (past the bound it is dropped, and a snapshot makes
up for it); a batch stays queued until the index has it, and is sent again after a failure, which is safe because
numbers tell the index what it already has. Never decides from silence: an idle publisher asks every few seconds
whether the index is still in step, so an index that was restored from an old copy is found out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from core.errors import ServeError
from core.events import CacheEvent
from core.ids import Epoch, WorkerId
from kvindex.base import CacheSnapshot, PrefixIndex, PublishResult
from kvindex.config import IndexConfig

_logger = logging.getLogger(__name__)

TakeSnapshot = Callable[[], Awaitable[CacheSnapshot]]
"""Asks the engine for everything it holds and the number of its last event."""


@dataclass(slots=True)
class PublisherCounters:
    """Counts since the publisher was made, and two gauges (the last two), for metrics.

    events_accepted_total, events_published_total: from the engine, and known to be in the index.
    batches_total: calls that carried events.
    gaps_total: times the index found numbers missing.
    snapshots_total: snapshots put in place.
    overflows_total: times the queue was dropped because it was full.
    failures_total: calls, or snapshots, that failed.
    queued_hashes: block hashes waiting.
    is_in_step: whether the index had everything when last asked.
    """

    events_accepted_total: int = 0
    events_published_total: int = 0
    batches_total: int = 0
    gaps_total: int = 0
    snapshots_total: int = 0
    overflows_total: int = 0
    failures_total: int = 0
    queued_hashes: int = 0
    is_in_step: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    """Events numbered [first_number, end_number), and what they weigh in the queue."""

    first_number: int
    events: tuple[CacheEvent, ...]
    num_hashes: int

    @property
    def end_number(self) -> int:
        return self.first_number + len(self.events)


class EventPublisher:
    """Publishes one worker#epoch's events. on_unknown: called when the index does not know this epoch."""

    def __init__(
        self,
        index: PrefixIndex,
        worker_id: WorkerId,
        epoch: Epoch,
        take_snapshot: TakeSnapshot,
        config: IndexConfig,
        on_unknown: Callable[[], None],
    ) -> None:
        self._index = index
        self._worker_id = worker_id
        self._epoch = epoch
        self._take_snapshot = take_snapshot
        self._config = config
        self._on_unknown = on_unknown
        self._queue: deque[_Batch] = deque()
        self._accepted_end = 1  # number of the next event that the engine will send
        self._published_end = 1  # number of the first event that the index may lack
        self._is_paused = True
        self._needs_snapshot = False
        self._is_failing = False  # so that a long failure is logged once
        self._wake = asyncio.Event()
        self.counters = PublisherCounters()

    def accept(self, first_event_number: int, events: Sequence[CacheEvent]) -> None:
        """Take over events numbered from `first_event_number`. Call it from the event loop's thread."""
        if not events:
            return
        if first_event_number != self._accepted_end:
            # The front lost some on the way, or the engine counts anew: only a snapshot can tell.
            self._drop_queue()
        batch = _batch_of(first_event_number, events)
        self._queue.append(batch)
        self._accepted_end = batch.end_number
        self.counters.events_accepted_total += len(events)
        self.counters.queued_hashes += batch.num_hashes
        if self.counters.queued_hashes > self._config.max_queued_hashes:
            self.counters.overflows_total += 1
            self._drop_queue()
        self._wake.set()

    def resume(self) -> None:
        """The worker's entry is registered: find out what the index lacks, and send it."""
        self.counters.is_in_step = False  # so the next call asks, and an empty index answers GAP
        self._is_paused = False
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wait_for_work()
            started_s = time.monotonic()
            try:
                await self._advance()
            except ServeError as error:
                await self._back_off(error)
            else:
                self._is_failing = False
            pause_s = started_s + self._config.publish_interval_ms / 1000 - time.monotonic()
            await asyncio.sleep(max(0.0, pause_s))

    def _drop_queue(self) -> None:
        self._queue.clear()
        self.counters.queued_hashes = 0
        self._needs_snapshot = True

    async def _wait_for_work(self) -> None:
        """Return when there is something to send, or when it is time to ask whether all has arrived."""
        while True:
            self._wake.clear()
            is_behind = self._queue or self._needs_snapshot or not self.counters.is_in_step
            if is_behind and not self._is_paused:
                return
            verify_s = None if self._is_paused else self._config.verify_interval_ms / 1000
            try:
                # Not wait_for: before Python 3.12 it can lose a cancellation that meets the timeout.
                async with asyncio.timeout(verify_s):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _advance(self) -> None:
        if self._needs_snapshot:
            await self._send_snapshot()
        else:
            await self._send_events()

    async def _send_events(self) -> None:
        """Send the head of the queue, or nothing but its number, which asks whether the index is in step."""
        batches = self._head_of_queue()
        events = [event for batch in batches for event in batch.events]
        first = batches[0].first_number if batches else self._published_end
        result = await self._index.publish(self._worker_id, self._epoch, first, events)
        if not self._is_applied(result):
            return
        self._published_end = max(self._published_end, first + len(events))
        self._forget_published()
        self.counters.batches_total += bool(events)
        self.counters.events_published_total += len(events)

    async def _send_snapshot(self) -> None:
        self._needs_snapshot = False  # what happens from here on asks for another one
        try:
            snapshot = await self._snapshot()
            result = await self._index.replace(
                self._worker_id, self._epoch, snapshot.sequence_number, snapshot.hashes
            )
            if result is PublishResult.GAP:
                # The index knows later events than the engine, or pieces were lost: no thing to try in a hurry.
                number = snapshot.sequence_number
                raise ServeError(f"index: refused a snapshot up to event {number}")
        except ServeError:
            self._needs_snapshot = True
            raise
        if not self._is_applied(result):
            self._needs_snapshot = True
            return
        self._published_end = snapshot.sequence_number + 1
        self._forget_published()
        self.counters.snapshots_total += 1

    async def _snapshot(self) -> CacheSnapshot:
        try:
            async with asyncio.timeout(self._config.snapshot_timeout_ms / 1000):
                return await self._take_snapshot()
        except TimeoutError:
            limit_ms = self._config.snapshot_timeout_ms
            raise ServeError(f"index: the engine took no snapshot within {limit_ms} ms") from None

    def _is_applied(self, result: PublishResult) -> bool:
        self.counters.is_in_step = result is PublishResult.APPLIED
        if result is PublishResult.GAP:
            self.counters.gaps_total += 1
            self._needs_snapshot = True
        elif result is not PublishResult.APPLIED:
            self._is_paused = True
            self._on_unknown()
        return self.counters.is_in_step

    def _head_of_queue(self) -> list[_Batch]:
        """Batches from the head that together carry at most `max_batch_hashes`; at least one if there is any."""
        head: list[_Batch] = []
        num_hashes = 0
        for batch in self._queue:
            num_hashes += batch.num_hashes
            if head and num_hashes > self._config.max_batch_hashes:
                break
            head.append(batch)
        return head

    def _forget_published(self) -> None:
        while self._queue and self._queue[0].end_number <= self._published_end:
            self.counters.queued_hashes -= self._queue.popleft().num_hashes

    async def _back_off(self, error: ServeError) -> None:
        if not self._is_failing:
            _logger.warning("worker %s: cache events wait: %s", self._worker_id, error.message)
        self._is_failing = True
        self.counters.failures_total += 1
        self.counters.is_in_step = False
        await asyncio.sleep(self._config.retry_interval_ms / 1000)


def _batch_of(first_number: int, events: Sequence[CacheEvent]) -> _Batch:
    """The events without what the index does not keep, so that a long queue holds hashes only."""
    slim = tuple(
        replace(event, token_ids=(), foreign_hashes=())
        if event.token_ids or event.foreign_hashes
        else event
        for event in events
    )
    return _Batch(first_number, slim, sum(1 + len(event.hashes) for event in slim))
