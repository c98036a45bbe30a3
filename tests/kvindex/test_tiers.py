"""Tiers below the device in the index: what each holds is told apart, whatever happens to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count, permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.block_hash import BlockHash
from core.events import CacheEvent, EventKind, Tier
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.base import LOCAL_TIERS, PrefixIndex, PublishResult
from kvindex.config import IndexConfig
from kvindex.memory import MemoryIndex
from kvindex.redis_index import RedisIndex
from services.cluster.valkey import ValkeyServer
from tests.support.index_backends import Backend
from tests.support.index_values import ROOT, cleared, create_chain, create_worker, removed, stored

LEASE_MS = 60_000
HELD = {Tier.DEVICE: 2, Tier.HOST: 4, Tier.DISK: 6}
"""How many blocks of the chain each tier holds."""


async def join(index: PrefixIndex) -> WorkerInfo:
    worker = create_worker()
    await index.register(worker, LEASE_MS)
    await index.heartbeat(worker.id, worker.epoch, WorkerLoad(), LEASE_MS)
    return worker


async def publish(
    index: PrefixIndex, worker: WorkerInfo, number: int, *events: CacheEvent
) -> PublishResult:
    return await index.publish(worker.id, worker.epoch, number, events)


async def lengths(index: PrefixIndex, chain: Sequence[BlockHash]) -> tuple[int, int]:
    [found] = await index.match({ROOT.seed: chain})
    return found.device_blocks, found.local_blocks


def expected(held: dict[Tier, int]) -> tuple[int, int]:
    return held[Tier.DEVICE], max(held.values())


@pytest.mark.parametrize("by_snapshot", [False, True])
@pytest.mark.parametrize("order", list(permutations(LOCAL_TIERS)))
async def test_a_clear_of_one_tier_leaves_what_the_others_hold(
    backend: Backend, order: tuple[Tier, ...], by_snapshot: bool
) -> None:
    index, chain, held = backend.index, create_chain(6), dict(HELD)
    worker = await join(index)
    if by_snapshot:
        tiers = {tier: chain[:length] for tier, length in held.items()}
        assert await index.replace(worker.id, worker.epoch, 3, tiers) is PublishResult.APPLIED
    else:
        events = [stored(chain[:length], tier) for tier, length in held.items()]
        assert await publish(index, worker, 1, *events) is PublishResult.APPLIED
    assert await lengths(index, chain) == (2, 6)
    for number, tier in enumerate(order, start=4):
        held[tier] = 0
        assert await publish(index, worker, number, cleared(tier)) is PublishResult.APPLIED
        assert await lengths(index, chain) == expected(held)


@pytest.mark.parametrize("tier", LOCAL_TIERS)
async def test_a_tier_that_was_cleared_fills_again(backend: Backend, tier: Tier) -> None:
    index, chain, held = backend.index, create_chain(6), dict(HELD)
    worker = await join(index)
    events = [stored(chain[:length], tier) for tier, length in held.items()]
    await publish(index, worker, 1, *events)
    held[tier] = 5
    # In one batch: what came before the clear is gone, what comes after it stays.
    await publish(
        index, worker, 4, stored(chain, tier), cleared(tier), stored(chain[:3], tier), stored([])
    )
    await publish(index, worker, 8, stored(chain[3:5], tier))
    assert await lengths(index, chain) == expected(held)


async def test_a_block_goes_down_the_tiers_and_comes_back(backend: Backend) -> None:
    index, chain = backend.index, create_chain(3)
    worker = await join(index)
    steps = [
        (stored(chain), (3, 3)),
        (stored(chain, Tier.HOST), (3, 3)),
        (removed(chain[1:]), (1, 3)),
        (stored(chain, Tier.DISK), (1, 3)),
        (removed(chain, Tier.HOST), (1, 3)),
        (removed(chain[:1]), (0, 3)),
        (stored(chain[:2]), (2, 3)),
        (removed(chain[2:], Tier.DISK), (2, 2)),
        (removed(chain, Tier.DISK), (2, 2)),
    ]
    for number, (event, after) in enumerate(steps, start=1):
        await publish(index, worker, number, event)
        assert await lengths(index, chain) == after, number


async def test_a_snapshot_of_tiers_replaces_all_of_them(backend: Backend) -> None:
    index, chain = backend.index, create_chain(6)
    worker = await join(index)
    await publish(index, worker, 1, *[stored(chain, tier) for tier in LOCAL_TIERS])
    snapshot = {Tier.HOST: chain[:3], Tier.DISK: chain[:5], Tier.REMOTE: chain}
    assert await index.replace(worker.id, worker.epoch, 3, snapshot) is PublishResult.APPLIED
    assert await lengths(index, chain) == (0, 5)
    await publish(index, worker, 4, removed(chain[3:], Tier.DISK))
    assert await lengths(index, chain) == (0, 3)


# ---------------------------------------------------------------- any events at all

HASHES = create_chain(4)
Batches = list[list[CacheEvent]]
_numbers = count()

some_hashes = st.lists(st.sampled_from(HASHES), min_size=1, max_size=3, unique=True).map(tuple)
any_tier = st.sampled_from(Tier)
events = st.one_of(
    st.builds(CacheEvent, st.just(EventKind.STORED), any_tier, some_hashes),
    st.builds(CacheEvent, st.just(EventKind.REMOVED), any_tier, some_hashes),
    st.builds(CacheEvent, st.just(EventKind.CLEARED), any_tier | st.none()),
)


def applied(batches: Batches) -> dict[Tier, set[BlockHash]]:
    """What each tier holds, event by event."""
    held: dict[Tier, set[BlockHash]] = {tier: set() for tier in Tier}
    for event in (event for batch in batches for event in batch):
        for tier in [event.tier] if event.tier else list(Tier):
            if event.kind is EventKind.STORED:
                held[tier] |= set(event.hashes)
            elif event.kind is EventKind.REMOVED:
                held[tier] -= set(event.hashes)
            else:
                held[tier].clear()
    return held


@asynccontextmanager
async def fresh_index(server: ValkeyServer | None) -> AsyncIterator[PrefixIndex]:
    if server is None:
        yield MemoryIndex()
        return
    prefix = f"tiers{next(_numbers)}"
    index = RedisIndex(
        IndexConfig(redis_url=server.url, key_prefix=prefix, command_timeout_ms=5_000)
    )
    yield index
    await index.close()


@pytest.fixture(params=["memory", "redis"])
def server(request: pytest.FixtureRequest) -> ValkeyServer | None:
    return None if request.param == "memory" else request.getfixturevalue("valkey")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches=st.lists(st.lists(events, min_size=1, max_size=4), max_size=5))
def test_each_tier_holds_what_its_events_say(server: ValkeyServer | None, batches: Batches) -> None:
    held = applied(batches)

    async def check() -> None:
        async with fresh_index(server) as index:
            worker = await join(index)
            number = 1
            for batch in batches:
                result = await publish(index, worker, number, *batch)
                assert result is PublishResult.APPLIED
                number += len(batch)
            for block_hash in HASHES:  # a chain of one: membership, whatever else is held
                is_on_device = block_hash in held[Tier.DEVICE]
                is_anywhere = any(block_hash in held[tier] for tier in LOCAL_TIERS)
                assert await lengths(index, [block_hash]) == (is_on_device, is_anywhere)

    asyncio.run(check())
