"""Whatever happens on the way, an index in Redis comes to what its workers hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from core.events import CacheEvent, EventKind, Tier
from core.ids import Epoch
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.base import LOCAL_TIERS, IndexUnavailable
from kvindex.config import IndexConfig
from kvindex.net_effect import TIER_BITS
from kvindex.redis_index import RedisIndex
from kvindex.session import WorkerSession
from services.cluster.valkey import ValkeyServer
from tests.support.fake_cache import FakeCache
from tests.support.index_values import ROOT, create_chain, create_worker
from tests.support.valkey import command, running_valkey


def quick(server: ValkeyServer, *, max_queued_hashes: int = 131_072) -> IndexConfig:
    return IndexConfig(
        redis_url=server.url,
        command_timeout_ms=500,
        retry_interval_ms=20,
        lease_ms=60_000,
        heartbeat_interval_ms=50,
        publish_interval_ms=1,
        verify_interval_ms=100,
        max_queued_hashes=max_queued_hashes,
    )


@asynccontextmanager
async def member(
    config: IndexConfig, worker: WorkerInfo, cache: FakeCache
) -> AsyncIterator[WorkerSession]:
    """A worker's session on an index object, and so connections, of its own."""
    index = RedisIndex(config)
    session = WorkerSession(index, worker, WorkerLoad, cache.take_snapshot, config)
    task = asyncio.create_task(session.run())
    try:
        yield session
        assert not task.done(), "the session ended by itself"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await index.close()


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is awaited are plain counters
            await asyncio.sleep(0.005)


async def held_in_redis(server: ValkeyServer, worker: WorkerInfo) -> dict[bytes, int]:
    key = f"baton:1:{{0}}:index:{worker.id}#{worker.epoch}"
    entries = await command(server, "HGETALL", key)
    return {block_hash: int(bits) for block_hash, bits in entries.items()}


def held_in_cache(cache: FakeCache) -> dict[bytes, int]:
    held: dict[bytes, int] = {}
    for tier in LOCAL_TIERS:
        for block_hash in cache.held[tier]:
            held[block_hash] = held.get(block_hash, 0) | TIER_BITS[tier]
    return held


async def until_equal(server: ValkeyServer, worker: WorkerInfo, cache: FakeCache) -> None:
    async with asyncio.timeout(30):
        while await held_in_redis(server, worker) != held_in_cache(cache):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.failure_edge("index gap / dump / clear / restart")
async def test_a_server_killed_and_restarted_is_filled_again() -> None:
    with running_valkey(port=0) as server:
        config, cache, chain = quick(server), FakeCache(), create_chain(300)
        reader = RedisIndex(config)
        worker = create_worker()
        async with member(config, worker, cache) as session:
            session.accept(*cache.store(chain[:100]))
            await until_equal(server, worker, cache)
            server.kill()
            session.accept(*cache.store(chain[100:200]))
            await until(lambda: not session.counters.is_connected)
            session.accept(*cache.remove(chain[150:200]))
            server.restart()
            await until_equal(server, worker, cache)
            session.accept(*cache.store(chain[150:300]))
            await until_equal(server, worker, cache)
            assert session.publisher_counters.snapshots_total >= 1
            [found] = await reader.match({ROOT.seed: chain})
            assert found.device_blocks == 300
            assert not found.report.is_silent(5_000)
        await reader.close()


async def test_a_server_that_hangs_for_a_while_loses_nothing() -> None:
    with running_valkey() as server:
        config, cache, chain = quick(server), FakeCache(), create_chain(200)
        worker = create_worker()
        async with member(config, worker, cache) as session:
            session.accept(*cache.store(chain[:100]))
            await until_equal(server, worker, cache)
            server.pause()
            session.accept(*cache.store(chain[100:]))
            await until(lambda: session.publisher_counters.failures_total > 0)
            server.resume()
            await until_equal(server, worker, cache)
            assert session.publisher_counters.snapshots_total == 0
            assert session.counters.registrations_total == 1


async def test_a_worker_whose_entry_vanished_comes_back() -> None:
    with running_valkey() as server:
        config, cache, chain = quick(server), FakeCache(), create_chain(50)
        worker = create_worker()
        async with member(config, worker, cache) as session:
            session.accept(*cache.store(chain))
            await until_equal(server, worker, cache)
            await command(server, "FLUSHALL")  # as the end of its lease does
            await until_equal(server, worker, cache)
            assert session.counters.registrations_total == 2


@pytest.mark.failure_edge("P restarts on same address")
@pytest.mark.public_case("B36")
async def test_a_killed_and_restarted_worker_owns_its_name_at_once() -> None:
    """The old process does not deregister, and speaks again after its successor has joined."""
    with running_valkey() as server:
        config, chain = quick(server), create_chain(20)
        old_cache, new_cache = FakeCache(), FakeCache()
        old, new = create_worker(epoch=11), create_worker(epoch=12)
        async with member(config, old, old_cache) as zombie:
            zombie.accept(*old_cache.store(chain))
            await until_equal(server, old, old_cache)
            async with member(config, new, new_cache) as session:
                session.accept(*new_cache.store(chain[:5]))
                zombie.accept(*old_cache.store(create_chain(20, "late")))
                await until_equal(server, new, new_cache)
                await until(lambda: zombie.counters.is_superseded)
                assert await held_in_redis(server, old) == {}


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_life_ends_in_agreement(seed: int) -> None:
    """Random stores, removals and clears under kills, hangs, flushes and lost handovers, with a short queue."""
    draw = random.Random(seed)
    chain = create_chain(40)
    with running_valkey(port=0) as server:
        config, cache, worker = quick(server, max_queued_hashes=60), FakeCache(), create_worker()
        async with member(config, worker, cache) as session:
            for _ in range(60):
                event = random_event(draw, chain)
                handed_over = cache.apply(event)
                if draw.random() > 0.03:
                    session.accept(*handed_over)
                await trouble(draw, server)
                await asyncio.sleep(draw.choice([0, 0, 0.002, 0.02]))
            session.accept(
                *cache.store(chain[:1])
            )  # a handover lost last of all shows with the next
            await until_equal(server, worker, cache)
            await until(lambda: session.publisher_counters.queued_hashes == 0)


def random_event(draw: random.Random, chain: list) -> CacheEvent:
    kind = draw.choices(list(EventKind), weights=[10, 6, 1])[0]
    start, end = sorted(draw.sample(range(len(chain) + 1), 2))
    hashes = () if kind is EventKind.CLEARED else tuple(chain[start:end])
    tiers = [*LOCAL_TIERS, Tier.REMOTE]
    tier = draw.choice([*tiers, None]) if kind is EventKind.CLEARED else draw.choice(tiers)
    return CacheEvent(kind, tier, hashes)


async def trouble(draw: random.Random, server: ValkeyServer) -> None:
    what = draw.choices(["", "restart", "hang", "flush"], weights=[40, 1, 1, 1])[0]
    if what == "restart":
        server.restart()
    elif what == "hang":
        server.pause()
        await asyncio.sleep(0.1)
        server.resume()
    elif what == "flush":
        await command(server, "FLUSHALL")


async def test_a_reader_fails_while_the_server_is_away_and_sees_workers_again() -> None:
    with running_valkey(port=0) as server:
        config, worker = quick(server), create_worker(epoch=Epoch(3))
        reader = RedisIndex(config)
        async with member(config, worker, FakeCache()) as session:
            await until(lambda: session.counters.heartbeats_total > 0)
            server.kill()
            with pytest.raises(IndexUnavailable):
                await reader.workers()
            server.restart()
            async with asyncio.timeout(30):
                while not await workers_or_none(reader):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert [s.info for s in await reader.workers()] == [worker]
        await reader.close()


async def workers_or_none(reader: RedisIndex) -> list:
    try:
        return await reader.workers()
    except IndexUnavailable:
        return []
