"""A tier's mover: a thread that carries blocks in and out, so that the engine thread waits for neither.

Questions to a shared store go first, then loads, and both come between two blocks of a store: a store is written
behind, when there is nothing better to do. What it has to write is bounded; beyond that, stores are turned away. A
long load is shared with a second thread: its sequence waits, so a core may well be free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from core.events import Tier as TierName
from kvtransfer.tiers.base import BlockKey, Placement, Tier

LEAST_FOR_TWO = 8
"""Blocks of a load that is worth another thread."""

logger = logging.getLogger(__name__)


class LoadTargets(Protocol):
    """Where the blocks of one load go. Called on the mover's threads."""

    def enter(self, index: int) -> memoryview | None:
        """The bytes to fill with the load's block `index`, until `leave`; None where nobody wants it any more."""
        ...

    def leave(self, index: int) -> None:
        """The mover writes there no more."""
        ...


class LoadDone(NamedTuple):
    """For `Tier.complete_load`: blocks that were asked for together.

    job: what the caller named the load.
    damaged: those of them that are not what was written.
    unread: those that nobody wanted any more, or that were not come to when the mover ended.
    seconds: time that reading the others took.
    """

    tier: TierName
    job: int
    placements: tuple[Placement, ...]
    damaged: tuple[Placement, ...] = ()
    unread: tuple[Placement, ...] = ()
    seconds: float = 0.0


class StoreDone(NamedTuple):
    """For `Tier.complete_store`: blocks of one plan that were written, or (ok False) were not and will not be.

    job: what the caller named the store. seconds: time that writing them took.
    """

    tier: TierName
    job: int
    placements: tuple[Placement, ...]
    ok: bool
    seconds: float = 0.0


class AskDone(NamedTuple):
    """The answer of a shared store: its leading `num_found` blocks of a chain are there."""

    tier: TierName
    job: int
    chain: tuple[BlockKey, ...]
    num_found: int


TierEvent = LoadDone | StoreDone | AskDone
PostDone = Callable[[TierEvent], None]
"""Puts the end of a job into the engine thread's inbox. Called on the mover's thread; must not block or raise."""


class _Load(NamedTuple):
    job: int
    placements: tuple[Placement, ...]
    targets: LoadTargets


class _Store(NamedTuple):
    job: int
    placements: tuple[Placement, ...]
    blocks: Sequence[memoryview]


class _Question(NamedTuple):
    job: int
    chain: tuple[BlockKey, ...]
    is_wanted: Callable[[], bool]


class TierMover:
    """Carries blocks between a tier and memory of the caller's. `ask`, `load`, `store`, `stop`: engine thread.

    name: which tier it is, for the events.
    tier: its `expect`, `read`, `write` and `ask` are called here, on the mover's thread, and nothing else of it.
    post: told of the end of each job: one LoadDone a load, one AskDone a question, one StoreDone or, where only some
        of the blocks were written, two a store.
    max_waiting_bytes: of blocks to be stored that wait or are being written.
    load_rate: limit of what is read, in bytes a second, 0 for none.
    num_readers: threads that a long load is read by, this one included; more than one for tiers that can use them.
    """

    def __init__(
        self,
        name: TierName,
        tier: Tier,
        post: PostDone,
        max_waiting_bytes: int,
        load_rate: float = 0.0,
        num_readers: int = 1,
    ) -> None:
        self._name = name
        self._tier = tier
        self._post = post
        self._seconds_a_block = tier.block_bytes / load_rate if load_rate else 0.0
        self._max_waiting_blocks = max(1, max_waiting_bytes // tier.block_bytes)
        self._num_waiting_blocks = 0
        self._urgent: deque[_Load | _Question] = deque()
        self._stores: deque[_Store] = deque()
        self._is_stopped = False
        self._num_readers = num_readers
        self._readers = ThreadPoolExecutor(
            max(1, num_readers - 1), thread_name_prefix=f"kv-tier-{name}-reader"
        )
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"kv-tier-{name}", daemon=True)
        self._thread.start()

    @property
    def num_waiting_blocks(self) -> int:
        """Blocks to be stored that are not written yet."""
        return self._num_waiting_blocks

    def room(self) -> int:
        """How many blocks a store may have to be taken. It grows at most until the next `store`."""
        with self._changed:
            return self._max_waiting_blocks - self._num_waiting_blocks

    def ask(
        self, job: int, chain: Sequence[BlockKey], is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Ask the store itself how much of a chain it has. is_wanted: whether still, asked here before the store is."""
        self._put(self._urgent, _Question(job, tuple(chain), is_wanted))

    def load(self, job: int, placements: Sequence[Placement], targets: LoadTargets) -> None:
        """Fill a target for each placement of a `prepare_load`, in order."""
        self._put(self._urgent, _Load(job, tuple(placements), targets))

    def store(
        self, job: int, placements: Sequence[Placement], blocks: Sequence[memoryview]
    ) -> None:
        """Write the bytes of each placement of a plan. They are not to change until StoreDone; see `room` first."""
        assert len(placements) == len(blocks), "bytes for each block"
        assert len(placements) <= self.room(), "more is stored than may wait"
        with self._changed:
            self._num_waiting_blocks += len(placements)
        self._put(self._stores, _Store(job, tuple(placements), blocks))

    def stop(self) -> None:
        """End the thread after the block it is at; what it has not come to is posted as not done. Idempotent."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()
        self._readers.shutdown()

    # ---- the mover's thread

    def _put(self, jobs: deque[_Store] | deque[_Load | _Question], job: object) -> None:
        with self._changed:
            assert not self._is_stopped, "the mover is stopped"
            jobs.append(job)  # type: ignore[arg-type]
            self._changed.notify()

    def _run(self) -> None:
        while job := self._next_store():
            self._do_store(job)

    def _next_store(self) -> _Store | None:
        """Wait for a store, doing what is urgent; None when it is time to end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or self._urgent or self._stores)
                is_stopped = self._is_stopped
                if not is_stopped and not self._urgent:
                    return self._stores.popleft()
            if is_stopped:
                self._give_up()
                return None
            self._do_urgent()

    def _do_store(self, job: _Store) -> None:
        num_written, seconds = 0, 0.0
        try:
            for placement, block in zip(job.placements, job.blocks, strict=True):
                self._do_urgent()
                if self._is_stopped:
                    break
                started = time.perf_counter()
                self._tier.write(placement, block)
                seconds += time.perf_counter() - started
                num_written += 1
        except OSError as error:
            logger.warning("%s tier: a block cannot be stored: %s", self._name, error)
        except Exception:  # whatever it is, the rest of the job has to be answered
            logger.exception("%s tier: a block cannot be stored", self._name)
        self._end_store(job.job, job.placements[:num_written], True, seconds)
        self._end_store(job.job, job.placements[num_written:], False, 0.0)

    def _end_store(
        self, job: int, placements: tuple[Placement, ...], ok: bool, seconds: float
    ) -> None:
        if placements:
            with self._changed:
                self._num_waiting_blocks -= len(placements)
            self._post(StoreDone(self._name, job, placements, ok, seconds))

    def _do_urgent(self) -> None:
        while self._urgent and not self._is_stopped:
            job = self._urgent.popleft()
            if isinstance(job, _Load):
                self._do_load(job)
            else:
                self._do_ask(job)

    def _do_ask(self, job: _Question) -> None:
        try:
            num_found = self._tier.ask(job.chain) if job.is_wanted() else 0
        except Exception:
            logger.exception("%s tier: the store cannot be asked", self._name)
            num_found = 0
        self._post(AskDone(self._name, job.job, job.chain, num_found))

    def _do_load(self, job: _Load) -> None:
        """Several readers take every other block each, so that what comes first is what is needed first."""
        count = len(job.placements)
        num_readers = self._num_readers if count >= LEAST_FOR_TWO else 1
        started = time.perf_counter()
        try:
            self._tier.expect(job.placements)
        except Exception:  # only a hint
            logger.exception("%s tier: what is read next cannot be prepared", self._name)
        parts = [range(first, count, num_readers) for first in range(num_readers)]
        others = [
            self._readers.submit(self._read_part, job, part, num_readers) for part in parts[1:]
        ]
        outcomes = [self._read_part(job, parts[0], num_readers)]
        outcomes += [other.result() for other in others]
        seconds = time.perf_counter() - started
        damaged = tuple(placement for outcome in outcomes for placement in outcome[0])
        unread = tuple(placement for outcome in outcomes for placement in outcome[1])
        self._post(LoadDone(self._name, job.job, job.placements, damaged, unread, seconds))

    def _read_part(
        self, job: _Load, part: range, num_readers: int
    ) -> tuple[list[Placement], list[Placement]]:
        """Read some blocks of a load: (damaged, unread). Never raises: the load has to be answered."""
        damaged: list[Placement] = []
        unread = [job.placements[index] for index in part]
        try:
            for index in part:
                placement = job.placements[index]
                if self._is_stopped or (block := job.targets.enter(index)) is None:
                    continue
                unread.remove(placement)
                try:
                    if self._seconds_a_block:
                        time.sleep(num_readers * self._seconds_a_block)
                    if not self._is_read(placement, block):
                        damaged.append(placement)
                finally:
                    job.targets.leave(index)
        except Exception:
            logger.exception("%s tier: blocks cannot be loaded", self._name)
        return damaged, unread

    def _is_read(self, placement: Placement, block: memoryview) -> bool:
        try:
            return self._tier.read(placement, block)
        except Exception:
            logger.exception("%s tier: a block cannot be read", self._name)
            return False

    def _give_up(self) -> None:
        """Nothing is left unanswered."""
        while self._urgent:
            job = self._urgent.popleft()
            if isinstance(job, _Load):
                self._post(LoadDone(self._name, job.job, job.placements, unread=job.placements))
            else:
                self._post(AskDone(self._name, job.job, job.chain, 0))
        while self._stores:
            store = self._stores.popleft()
            self._end_store(store.job, store.placements, False, 0.0)
