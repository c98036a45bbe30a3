"""A tier's mover: one thread that carries blocks in and out, so that the engine thread waits for neither.

Loads go before stores, and one comes between two blocks of a store: a store is written behind, when there is nothing
better to do. What it has to write is bounded; beyond that, stores are turned away.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtransfer.tiers.base import Placement, Tier

logger = logging.getLogger(__name__)


class LoadDone(NamedTuple):
    """For `Tier.complete_load`: blocks that were asked for together.

    damaged: those of them that are not what was written.
    was_read: False where the mover ended first: nothing is damaged, and no buffer holds anything.
    """

    placements: tuple[Placement, ...]
    damaged: tuple[Placement, ...] = ()
    was_read: bool = True


class StoreDone(NamedTuple):
    """For `Tier.complete_store`: blocks of one plan that were written, or (ok False) were not and will not be."""

    placements: tuple[Placement, ...]
    ok: bool


PostDone = Callable[[LoadDone | StoreDone], None]
"""Puts the end of a job into the engine thread's inbox. Called on the mover's thread; must not block or raise."""


class _Job(NamedTuple):
    placements: Sequence[Placement]
    blocks: Sequence[memoryview]


class TierMover:
    """Carries blocks between a tier and buffers of the caller's. `load`, `store`, `stop`: engine thread.

    tier: its `read` and `write` are called here, on the mover's thread, and nothing else of it.
    post: told of the end of each job: one LoadDone a load, one StoreDone or, where only some of the blocks were
        written, two a store.
    max_waiting_bytes: of blocks to be stored that wait or are being written.
    """

    def __init__(self, tier: Tier, post: PostDone, max_waiting_bytes: int) -> None:
        self._tier = tier
        self._post = post
        self._max_waiting_blocks = max_waiting_bytes // tier.block_bytes
        self._num_waiting_blocks = 0
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._is_stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="baton-tier", daemon=True)
        self._thread.start()

    def has_room(self, num_blocks: int) -> bool:
        """Whether a store of so many blocks would be taken. It stays true until the next `store`."""
        with self._changed:
            return self._num_waiting_blocks + num_blocks <= self._max_waiting_blocks

    def load(self, placements: Sequence[Placement], blocks: Sequence[memoryview]) -> None:
        """Fill a buffer for each placement of a `prepare_load`. The buffers are the mover's until LoadDone."""
        assert len(placements) == len(blocks), "a buffer for each block"
        self._put(self._loads, _Job(placements, blocks))

    def store(self, placements: Sequence[Placement], blocks: Sequence[memoryview]) -> None:
        """Write the bytes of each placement of a plan. They are not to change until StoreDone; ask `has_room` first."""
        assert len(placements) == len(blocks), "bytes for each block"
        assert self.has_room(len(placements)), "more is stored than may wait"
        with self._changed:
            self._num_waiting_blocks += len(placements)
        self._put(self._stores, _Job(placements, blocks))

    def stop(self) -> None:
        """End the thread after the block it is at; what it has not come to is posted as not done. Idempotent."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    # ---- the mover's thread

    def _put(self, jobs: deque[_Job], job: _Job) -> None:
        with self._changed:
            assert not self._is_stopped, "the mover is stopped"
            jobs.append(job)
            self._changed.notify()

    def _run(self) -> None:
        while job := self._next(self._stores):
            self._store(job)

    def _next(self, stores: deque[_Job]) -> _Job | None:
        """Wait for a store, doing the loads that come; None when it is time to end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or self._loads or stores)
                is_stopped = self._is_stopped
                if not is_stopped and not self._loads:
                    return stores.popleft()
            if is_stopped:
                self._give_up()
                return None
            self._do_loads()

    def _store(self, job: _Job) -> None:
        num_written = 0
        try:
            for placement, block in zip(job.placements, job.blocks, strict=True):
                self._do_loads()
                if self._is_stopped:
                    break
                self._tier.write(placement, block)
                num_written += 1
        except OSError as error:
            logger.warning("a block cannot be stored: %s", error)
        except Exception:  # whatever it is, the rest of the job has to be answered
            logger.exception("a block cannot be stored")
        self._end_store(tuple(job.placements[:num_written]), ok=True)
        self._end_store(tuple(job.placements[num_written:]), ok=False)

    def _end_store(self, placements: tuple[Placement, ...], ok: bool) -> None:
        if placements:
            with self._changed:
                self._num_waiting_blocks -= len(placements)
            self._post(StoreDone(placements, ok))

    def _do_loads(self) -> None:
        while self._loads and not self._is_stopped:
            placements, blocks = self._loads.popleft()
            damaged = [
                placement
                for placement, block in zip(placements, blocks, strict=True)
                if not self._is_read(placement, block)
            ]
            self._post(LoadDone(tuple(placements), tuple(damaged)))

    def _is_read(self, placement: Placement, block: memoryview) -> bool:
        try:
            return self._tier.read(placement, block)
        except Exception:
            logger.exception("a block cannot be read")
            return False

    def _give_up(self) -> None:
        """Nothing is left unanswered."""
        while self._loads:
            placements = tuple(self._loads.popleft().placements)
            self._post(LoadDone(placements, was_read=False))
        while self._stores:
            self._end_store(tuple(self._stores.popleft().placements), ok=False)
