"""A worker in the index: it joins, reports, publishes, comes back after the index was away, and
leaves.
"""

from collections.abc import Iterator

import pytest

from core.events import CacheEvent, Tier
from core.worker_info import WorkerLoad
from engine.messages import SnapshotTaken, StepDone, TakeSnapshot, ToEngine
from engine.stats import EngineStats
from kvindex.base import PrefixIndex
from kvindex.config import IndexConfig
from kvindex.connect import connect_index
from services.cluster.valkey import ValkeyServer, start_valkey
from services.worker.registration import Registration
from services.worker.snapshots import Snapshots
from tests.support.index_values import cleared, create_chain, create_worker, removed, stored
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


async def test_tiers_go_the_whole_way_from_steps_and_snapshots_into_the_index(
    server: ValkeyServer,
) -> None:
    """STORED, REMOVED and CLEARED of each tier, then a gap that only a snapshot of all tiers can close."""
    config = IndexConfig(redis_url=server.url, publish_interval_ms=1)
    index, info, chain = connect_index(config), create_worker("w"), create_chain(6)
    asked: list[ToEngine] = []
    snapshots = Snapshots(asked.append)
    registration = Registration(config, info, snapshots, lambda: True)
    registration.start()

    def tell(number: int, *events: CacheEvent) -> None:
        load = WorkerLoad()
        registration.note_step(StepDone([], list(events), number, load, EngineStats()), load)

    async def wait_for_lengths(device: int, local: int) -> None:
        async def are_there() -> bool:
            found = await index.match({info.hash_root.seed: chain})
            return [(m.device_blocks, m.local_blocks) for m in found] == [(device, local)]

        await eventually(are_there)

    tell(1, stored(chain[:2]), stored(chain[:4], Tier.HOST), stored(chain, Tier.DISK))
    await wait_for_lengths(2, 6)
    tell(4, removed(chain[5:], Tier.DISK))
    await wait_for_lengths(2, 5)
    tell(5, cleared(Tier.DISK))
    await wait_for_lengths(2, 4)
    tell(6, cleared(Tier.DEVICE))
    await wait_for_lengths(0, 4)
    tell(9, stored(chain[:1]))  # events 7 and 8 were lost
    await eventually(lambda: bool(asked))
    [question] = asked
    assert isinstance(question, TakeSnapshot)
    held = {
        Tier.DEVICE: chain[:1],
        Tier.HOST: chain[:2],
        Tier.DISK: chain[:3],
        Tier.REMOTE: chain,
    }
    snapshots.handle(SnapshotTaken(question.query_id, 9, held))
    await wait_for_lengths(1, 3)
    tell(10, cleared(Tier.HOST), removed(chain[2:], Tier.DISK))
    await wait_for_lengths(1, 2)
    await registration.close()
    await index.close()
