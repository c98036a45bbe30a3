"""A worker in the index: it joins, reports, publishes, comes back after the index was away, and
leaves.
"""

from collections.abc import Iterator

import pytest

from core.events import Tier
from kvindex.base import PrefixIndex
from kvindex.config import IndexConfig
from kvindex.connect import connect_index
from services.cluster.valkey import ValkeyServer, start_valkey
from tests.support.worker_calls import eventually, gateway, make_front, make_request


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    started = start_valkey()
    yield started
    started.stop()


async def worker_ids(index: PrefixIndex) -> list[str]:
    return [state.info.id for state in await index.workers()]


async def wait_for_workers(index: PrefixIndex, *expected: str) -> None:
    async def are_there() -> bool:
        return await worker_ids(index) == list(expected)

    await eventually(are_there)


async def test_a_worker_joins_publishes_and_leaves(server: ValkeyServer) -> None:
    config = IndexConfig(redis_url=server.url)
    index = connect_index(config)
    async with make_front(index=config, worker_id="w") as front:
        await wait_for_workers(index, "w")
        (state,) = await index.workers()
        assert state.info == front.info
        async with gateway(front) as end:
            await end.submit(make_request("r1"))
            await end.ending("r1")

        async def are_published() -> bool:
            return bool((await index.workers())[0].report.last_event_number)

        await eventually(are_published)
    assert await worker_ids(index) == []
    await index.close()


@pytest.mark.failure_edge("Redis lost")
async def test_a_worker_serves_without_its_index_and_joins_it_later(server: ValkeyServer) -> None:
    config = IndexConfig(redis_url=server.url, retry_interval_ms=50)
    server.kill()
    async with make_front(index=config, worker_id="w") as front:
        async with gateway(front) as end:
            await end.submit(make_request("r1"))
            assert (await end.ending("r1")).finish_reason == "length"
        server.restart()
        index = connect_index(config)
        await wait_for_workers(index, "w")
        snapshot = await front._state.snapshots.take()
        assert len(snapshot.hashes[Tier.DEVICE]) == 2
        await index.close()
