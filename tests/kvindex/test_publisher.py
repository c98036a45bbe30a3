"""The worker's side against an index in memory that can be made to fail, forget and hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from core.block_hash import BlockHash
from core.errors import ConfigError
from core.events import CacheEvent, EventKind, Tier
from core.ids import Epoch, WorkerId
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.base import CacheSnapshot, IndexUnavailable, PublishResult, RegisterResult
from kvindex.config import IndexConfig
from kvindex.memory import MemoryIndex
from kvindex.session import WorkerSession
from tests.support.fake_cache import FakeCache
from tests.support.index_values import ROOT, create_chain, create_worker

IDLE = WorkerLoad()
QUICK = IndexConfig(
    retry_interval_ms=10, heartbeat_interval_ms=20, publish_interval_ms=1, verify_interval_ms=50
)


class TroubledIndex(MemoryIndex):
    """An index whose calls fail while `is_away`, and that counts how often it was asked to publish."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.num_publishes = 0
        self.loses_answers = False

    def forget_everything(self) -> None:
        """What a restarted, empty server looks like."""
        self._entries.clear()
        self._epochs.clear()

    def _answer(self) -> None:
        if self.is_away:
            raise IndexUnavailable("index: away")

    async def register(self, info: WorkerInfo, lease_ms: int) -> RegisterResult:
        self._answer()
        return await super().register(info, lease_ms)

    async def heartbeat(
        self, worker_id: WorkerId, epoch: Epoch, load: WorkerLoad, lease_ms: int
    ) -> bool:
        self._answer()
        return await super().heartbeat(worker_id, epoch, load, lease_ms)

    async def deregister(self, worker_id: WorkerId, epoch: Epoch) -> None:
        self._answer()
        await super().deregister(worker_id, epoch)

    async def publish(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        first_event_number: int,
        events: Sequence[CacheEvent],
    ) -> PublishResult:
        self._answer()
        self.num_publishes += bool(events)
        result = await super().publish(worker_id, epoch, first_event_number, events)
        if self.loses_answers and events:
            self.loses_answers = False
            raise IndexUnavailable("index: the answer was lost on the way")
        return result

    async def replace(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        sequence_number: int,
        hashes: Mapping[Tier, Sequence[BlockHash]],
    ) -> PublishResult:
        self._answer()
        return await super().replace(worker_id, epoch, sequence_number, hashes)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is awaited are plain counters
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running_session(
    index: MemoryIndex,
    cache: FakeCache,
    *,
    config: IndexConfig = QUICK,
    worker: WorkerInfo | None = None,
    load: WorkerLoad | None = IDLE,
) -> AsyncIterator[WorkerSession]:
    session = WorkerSession(
        index, worker or create_worker(), lambda: load, cache.take_snapshot, config
    )
    task = asyncio.create_task(session.run())
    try:
        yield session
        assert not task.done(), "the session ended by itself"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_in_step(session: WorkerSession) -> None:
    counters = session.publisher_counters
    await until(lambda: counters.is_in_step and counters.queued_hashes == 0)


async def lengths(index: MemoryIndex, chain: list[BlockHash]) -> tuple[int, int]:
    [found] = await index.match({ROOT.seed: chain})
    return found.device_blocks, found.local_blocks


async def test_a_worker_joins_reports_and_tells_its_events() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(4)
    async with running_session(index, cache) as session:
        await until(lambda: session.counters.heartbeats_total > 0)
        session.accept(*cache.store(chain))
        session.accept(*cache.remove(chain[3:]))
        await until_in_step(session)
        assert await lengths(index, chain) == (3, 3)
        assert session.counters.is_connected
        assert cache.num_snapshots == 0  # from its first event on, no snapshot is needed


async def test_events_before_the_first_registration_are_kept() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(4)
    index.is_away = True
    async with running_session(index, cache) as session:
        for block_hash in chain:
            session.accept(*cache.store([block_hash]))
        await until(lambda: session.counters.failures_total > 1)
        assert not session.counters.is_connected
        index.is_away = False
        await until_in_step(session)
        assert await lengths(index, chain) == (4, 4)
        assert cache.num_snapshots == 0


@pytest.mark.failure_edge("no events arriving at all")
async def test_a_worker_without_events_still_says_that_it_is_in_step() -> None:
    index = TroubledIndex()
    async with running_session(index, FakeCache()) as session:
        await until(lambda: session.counters.heartbeats_total > 3)
        await until_in_step(session)
        [state] = await index.workers()
        assert state.report.last_event_number == 0
        assert not state.report.is_silent(max_index_age_ms=1_000)


async def test_no_report_while_the_engine_is_silent() -> None:
    index = TroubledIndex()
    async with running_session(index, FakeCache(), load=None) as session:
        await until(lambda: session.publisher_counters.is_in_step)
        assert session.counters.heartbeats_total == 0
        assert await index.workers() == []


async def test_a_lost_answer_is_no_gap() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(6)
    async with running_session(index, cache) as session:
        await until_in_step(session)
        index.loses_answers = True
        session.accept(*cache.store(chain[:4]))
        await until(lambda: session.publisher_counters.failures_total > 0)
        session.accept(*cache.store(chain[4:]))
        await until_in_step(session)
        assert await lengths(index, chain) == (6, 6)
        assert session.publisher_counters.gaps_total == 0
        assert cache.num_snapshots == 0


@pytest.mark.failure_edge("index gap / dump / clear / restart")
async def test_an_index_that_lost_everything_is_filled_by_a_snapshot() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(6)
    async with running_session(index, cache) as session:
        session.accept(*cache.store(chain[:3]))
        session.accept(*cache.store(chain[:5], Tier.HOST))
        await until_in_step(session)
        index.forget_everything()
        # Nothing changes in the cache: the heartbeat alone must find it out.
        await until(lambda: session.publisher_counters.snapshots_total == 1)
        await until(lambda: session.counters.registrations_total == 2)
        assert await lengths(index, chain) == (3, 5)
        session.accept(*cache.store(chain[3:4]))
        await until_in_step(session)
        assert await lengths(index, chain) == (4, 5)
        assert cache.num_snapshots == 1


@pytest.mark.failure_edge("index gap / dump / clear / restart")
async def test_an_index_from_an_old_copy_is_found_out_without_events() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(6)
    worker = create_worker()
    async with running_session(index, cache, worker=worker) as session:
        for block_hash in chain:
            session.accept(*cache.store([block_hash]))
        await until_in_step(session)
        entry = index._entries[worker.id]
        entry.last_event_number = 2
        entry.tiers = {Tier.DEVICE: set(chain[:2])}
        await until(lambda: session.publisher_counters.snapshots_total == 1)
        assert await lengths(index, chain) == (6, 6)
        assert session.publisher_counters.gaps_total == 1


async def test_events_lost_before_the_publisher_make_a_snapshot() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(6)
    async with running_session(index, cache) as session:
        session.accept(*cache.store(chain[:2]))
        cache.store(chain[2:4])  # never handed over
        session.accept(*cache.store(chain[4:]))
        await until(lambda: session.publisher_counters.snapshots_total >= 1)
        await until_in_step(session)
        assert await lengths(index, chain) == (6, 6)


async def test_a_full_queue_is_dropped_and_made_up_for() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(60)
    config = IndexConfig(
        retry_interval_ms=10, heartbeat_interval_ms=20, publish_interval_ms=1, max_queued_hashes=40
    )
    index.is_away = True
    async with running_session(index, cache, config=config) as session:
        for block_hash in chain:
            session.accept(*cache.store([block_hash]))
            assert session.publisher_counters.queued_hashes <= 40
        assert session.publisher_counters.overflows_total > 0
        index.is_away = False
        await until_in_step(session)
        assert await lengths(index, chain) == (60, 60)


async def test_a_queue_dropped_whole_before_joining_is_not_taken_for_an_empty_cache() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(10)
    config = IndexConfig(retry_interval_ms=10, heartbeat_interval_ms=20, max_queued_hashes=5)
    index.is_away = True
    async with running_session(index, cache, config=config) as session:
        session.accept(*cache.store(chain))
        assert session.publisher_counters.queued_hashes == 0
        index.is_away = False
        await until_in_step(session)
        assert await lengths(index, chain) == (10, 10)


async def test_a_snapshot_that_found_no_entry_is_sent_to_the_next_one() -> None:
    """The server restarts between the registration and the snapshot, before any event was published."""
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(10)
    config = IndexConfig(retry_interval_ms=10, heartbeat_interval_ms=20, max_queued_hashes=5)
    take_snapshot = cache.take_snapshot

    async def restart_meanwhile() -> CacheSnapshot:
        if cache.num_snapshots == 0:
            index.forget_everything()
        return await take_snapshot()

    cache.take_snapshot = restart_meanwhile  # type: ignore[method-assign]
    async with running_session(index, cache, config=config) as session:
        session.accept(*cache.store(chain))  # more than the queue takes: only a snapshot has it
        await until_in_step(session)
        await until(lambda: session.counters.registrations_total == 2)
        assert await lengths(index, chain) == (10, 10)
        assert cache.num_snapshots == 2


async def test_a_snapshot_that_fails_is_asked_again() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(4)
    async with running_session(index, cache) as session:
        session.accept(*cache.store(chain))
        await until_in_step(session)
        cache.is_dead = True
        index.forget_everything()
        await until(lambda: session.publisher_counters.failures_total > 1)
        assert await lengths(index, chain) == (0, 0)
        cache.is_dead = False
        await until_in_step(session)
        assert await lengths(index, chain) == (4, 4)


async def test_an_engine_that_takes_no_snapshot_does_not_end_the_lease() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(4)
    config = IndexConfig(retry_interval_ms=10, heartbeat_interval_ms=20, snapshot_timeout_ms=20)

    async def never() -> None:
        await asyncio.Event().wait()

    cache.take_snapshot = never  # type: ignore[method-assign, assignment]
    async with running_session(index, cache, config=config) as session:
        session.accept(*cache.store(chain))
        await until_in_step(session)
        index.forget_everything()
        await until(lambda: session.publisher_counters.failures_total > 1)
        beats = session.counters.heartbeats_total
        await until(lambda: session.counters.heartbeats_total > beats + 2)


async def test_steps_share_a_call_when_the_index_is_slow() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(200)
    config = IndexConfig(publish_interval_ms=100)
    async with running_session(index, cache, config=config) as session:
        await until_in_step(session)
        for block_hash in chain:
            session.accept(*cache.store([block_hash]))
            await asyncio.sleep(0)
        await until_in_step(session)
        assert await lengths(index, chain) == (200, 200)
        assert index.num_publishes <= 40  # of 200


async def test_a_long_queue_goes_in_calls_of_bounded_size() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(90)
    config = IndexConfig(publish_interval_ms=1, max_batch_hashes=20, heartbeat_interval_ms=20)
    async with running_session(index, cache, config=config) as session:
        for start in range(0, 90, 9):  # each weighs 10: nine hashes and the event itself
            session.accept(*cache.store(chain[start : start + 9]))
        await until_in_step(session)
        assert index.num_publishes == 5


@pytest.mark.failure_edge("P restarts on same address")
async def test_a_process_whose_name_was_taken_stays_out_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(4)
    async with running_session(index, cache, worker=create_worker(epoch=1)) as old:
        old.accept(*cache.store(chain))
        await until_in_step(old)
        async with running_session(index, FakeCache(), worker=create_worker(epoch=2)) as new:
            await until(lambda: old.counters.is_superseded)
            old.accept(*cache.store(create_chain(2, "more")))
            await until_in_step(new)
            assert await lengths(index, chain) == (0, 0)
            assert [s.info.epoch for s in await index.workers()] == [2]
    assert any("took this name" in record.message for record in caplog.records)


async def test_a_changed_record_is_published_without_losing_the_index() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(4)
    async with running_session(index, cache) as session:
        session.accept(*cache.store(chain))
        await until_in_step(session)
        changed = create_worker(role=create_worker().role)
        changed = WorkerInfo(
            **{f: getattr(changed, f) for f in changed.__slots__} | {"num_blocks": 99}
        )
        session.update_info(changed)
        beats = session.counters.heartbeats_total
        await until(lambda: session.counters.heartbeats_total > beats)
        [state] = await index.workers()
        assert state.info.num_blocks == 99
        assert await lengths(index, chain) == (4, 4)
        assert session.counters.registrations_total == 1


async def test_a_report_can_be_sent_before_its_time() -> None:
    index = TroubledIndex()
    config = IndexConfig(heartbeat_interval_ms=60_000, lease_ms=120_000)
    async with running_session(index, FakeCache(), config=config) as session:
        await until(lambda: session.counters.heartbeats_total == 1)
        session.report_now()
        await until(lambda: session.counters.heartbeats_total == 2)


async def test_leaving_takes_the_worker_out_and_survives_an_absent_index() -> None:
    index = TroubledIndex()
    async with running_session(index, FakeCache()) as session:
        await until(lambda: session.counters.heartbeats_total > 0)
    await session.leave()
    assert await index.workers() == []
    index.is_away = True
    await session.leave()


async def test_a_cancelled_session_always_ends() -> None:
    """Also when the cancellation meets the very moment at which a wait runs out."""
    config = IndexConfig(
        heartbeat_interval_ms=1, publish_interval_ms=1, verify_interval_ms=1, lease_ms=1_000
    )
    for number in range(150):
        index, cache = TroubledIndex(), FakeCache()
        session = WorkerSession(index, create_worker(), WorkerLoad, cache.take_snapshot, config)
        task = asyncio.create_task(session.run())
        await asyncio.sleep(0.002 + number % 10 * 0.0003)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=20)
        assert done, "the session went on after it was cancelled"


async def test_the_queue_keeps_hashes_only() -> None:
    index, cache, chain = TroubledIndex(), FakeCache(), create_chain(2)
    index.is_away = True
    async with running_session(index, cache) as session:
        event = CacheEvent(EventKind.STORED, Tier.DEVICE, tuple(chain), token_ids=tuple(range(32)))
        session.accept(1, [event])
        [batch] = session._publisher._queue
        assert batch.events == (CacheEvent(EventKind.STORED, Tier.DEVICE, tuple(chain)),)


def test_a_config_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="lease_ms: 900 must be at least twice"):
        IndexConfig(lease_ms=900, heartbeat_interval_ms=500)
    with pytest.raises(ConfigError, match="index_shards: 0 must be at least 1"):
        IndexConfig(index_shards=0)
    with pytest.raises(ConfigError, match="key_prefix"):
        IndexConfig(key_prefix="a{b}")
