"""On prefix-closed sets, match equals a plain walk; on any other set it is a hint of the right shape."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.block_hash import BlockHash
from core.events import Tier
from core.worker_info import WorkerLoad
from kvindex.base import LOCAL_TIERS, PrefixIndex
from kvindex.config import IndexConfig
from kvindex.memory import MemoryIndex
from kvindex.redis_index import RedisIndex
from services.cluster.valkey import ValkeyServer
from tests.support.index_values import ROOT, create_chain, create_worker, stored

LEASE_MS = 60_000

Prompt = tuple[int, ...]
Holding = dict[Tier, list[Prompt]]
"""What a worker holds in each tier, as the prompts whose whole chains it holds."""

# Two words and short prompts, so that prompts share prefixes of every length.
prompts = st.lists(st.integers(0, 1), min_size=0, max_size=12).map(tuple)
holdings = st.fixed_dictionaries({tier: st.lists(prompts, max_size=4) for tier in LOCAL_TIERS})
subsets = st.fixed_dictionaries({tier: st.sets(st.integers(0, 11)) for tier in LOCAL_TIERS})

_numbers = count()


def chain_of(prompt: Prompt) -> list[BlockHash]:
    prefixes = [prompt[: end + 1] for end in range(len(prompt))]
    return [BlockHash(hashlib.sha256(repr(p).encode()).digest()[:16]) for p in prefixes]


def closure(held: Iterable[Prompt]) -> set[BlockHash]:
    return {block_hash for prompt in held for block_hash in chain_of(prompt)}


def walk(chain: Sequence[BlockHash], is_held: Callable[[BlockHash], bool]) -> int:
    length = 0
    while length < len(chain) and is_held(chain[length]):
        length += 1
    return length


@asynccontextmanager
async def fresh_index(server: ValkeyServer | None) -> AsyncIterator[PrefixIndex]:
    """An empty index; in Redis a key prefix that no other example has had makes it empty."""
    if server is None:
        yield MemoryIndex()
        return
    config = IndexConfig(
        redis_url=server.url, key_prefix=f"example{next(_numbers)}", command_timeout_ms=5_000
    )
    index = RedisIndex(config)
    yield index
    await index.close()


@pytest.fixture(params=["memory", "redis"])
def server(request: pytest.FixtureRequest) -> ValkeyServer | None:
    return None if request.param == "memory" else request.getfixturevalue("valkey")


quickly = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


async def matched(
    index: PrefixIndex, held: list[dict[Tier, list[BlockHash]]], chain: list[BlockHash]
) -> list[tuple[int, int]]:
    """Both lengths of each worker, the tiers of worker i being held[i]."""
    for number, tiers in enumerate(held):
        worker = create_worker(f"w{number}")
        await index.register(worker, LEASE_MS)
        await index.heartbeat(worker.id, worker.epoch, WorkerLoad(), LEASE_MS)
        events = [stored(hashes, tier) for tier, hashes in tiers.items()]
        await index.publish(worker.id, worker.epoch, 1, events)
    found = await index.match({ROOT.seed: chain})
    return [(m.device_blocks, m.local_blocks) for m in found]


@quickly
@given(held=st.lists(holdings, min_size=1, max_size=4), asked=prompts)
def test_match_equals_a_walk(
    server: ValkeyServer | None, held: list[Holding], asked: Prompt
) -> None:
    sets = [{tier: closure(tiers[tier]) for tier in LOCAL_TIERS} for tiers in held]
    chain = chain_of(asked)
    expected = [
        (
            walk(chain, lambda h, tiers=tiers: h in tiers[Tier.DEVICE]),
            walk(chain, lambda h, tiers=tiers: any(h in s for s in tiers.values())),
        )
        for tiers in sets
    ]

    async def check() -> None:
        async with fresh_index(server) as index:
            as_lists = [{tier: sorted(s) for tier, s in tiers.items()} for tiers in sets]
            assert await matched(index, as_lists, chain) == expected

    asyncio.run(check())


@quickly
@given(held=holdings, expected=st.lists(prompts, max_size=4), asked=prompts)
def test_match_takes_the_longer_of_walk_and_expectation(
    server: ValkeyServer | None, held: Holding, expected: list[Prompt], asked: Prompt
) -> None:
    chain = chain_of(asked)
    sets = {tier: closure(held[tier]) for tier in LOCAL_TIERS}
    on_device = sets[Tier.DEVICE] | closure(expected)
    device_blocks = max(
        walk(chain, sets[Tier.DEVICE].__contains__), walk(chain, closure(expected).__contains__)
    )
    local_blocks = max(
        walk(chain, lambda h: any(h in s for s in sets.values())),
        walk(chain, closure(expected).__contains__),
    )

    async def check() -> None:
        async with fresh_index(server) as index:
            worker = create_worker("w0")
            await index.register(worker, LEASE_MS)
            for prompt in expected:
                await index.speculate(worker.id, chain_of(prompt), ttl_ms=30_000)
            as_lists = {tier: sorted(s) for tier, s in sets.items()}
            assert await matched(index, [as_lists], chain) == [(device_blocks, local_blocks)]

    assert walk(chain, on_device.__contains__) >= device_blocks
    asyncio.run(check())


@quickly
@given(held=subsets, length=st.integers(0, 12))
def test_on_any_set_the_answer_is_a_hint_of_the_right_shape(
    server: ValkeyServer | None, held: dict[Tier, set[int]], length: int
) -> None:
    whole = create_chain(12)
    tiers = {tier: [whole[p] for p in sorted(places)] for tier, places in held.items()}

    async def check() -> None:
        async with fresh_index(server) as index:
            [(device_blocks, local_blocks)] = await matched(index, [tiers], whole[:length])
            assert 0 <= device_blocks <= local_blocks <= length
            if device_blocks:
                assert whole[device_blocks - 1] in tiers[Tier.DEVICE]
            if not any(0 in places for places in held.values()):
                assert local_blocks == 0

    asyncio.run(check())
