"""The whole schema on the Redis that Debian ships: the oldest major version that the scripts ask for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from core.events import Tier
from core.worker_info import WorkerLoad
from kvindex.base import PublishResult, RegisterResult
from kvindex.config import IndexConfig
from kvindex.redis_index import RedisIndex
from services.cluster.valkey import start_valkey
from tests.support.index_values import (
    ROOT,
    cleared,
    create_chain,
    create_reservation,
    create_worker,
    removed,
    stored,
)


@pytest.mark.system
async def test_every_script_runs_on_debians_redis() -> None:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("the Debian package redis-server is not installed")
    server = start_valkey(binary=Path(binary))
    index = RedisIndex(IndexConfig(redis_url=server.url, command_timeout_ms=10_000))
    try:
        await live_a_life(index)
    finally:
        await index.close()
        server.stop()


async def live_a_life(index: RedisIndex) -> None:
    worker, chain = create_worker(), create_chain(600)
    assert await index.register(worker, 60_000) is RegisterResult.FRESH
    assert await index.heartbeat(worker.id, worker.epoch, WorkerLoad(), 60_000)
    for number, events in [
        (1, [stored(chain), removed(chain[550:])]),
        (3, [stored(chain[:560], Tier.HOST)]),
        (4, [cleared(Tier.HOST), removed(chain[500:550])]),
    ]:
        result = await index.publish(worker.id, worker.epoch, number, events)
        assert result is PublishResult.APPLIED
    assert await index.publish(worker.id, worker.epoch, 9, []) is PublishResult.GAP
    await index.speculate(worker.id, chain[:520])
    await index.reserve(create_reservation("r1"), create_reservation("r2"))
    await index.release(create_reservation("r2").request_id)
    [found] = await index.match({ROOT.seed: chain})
    assert (found.device_blocks, found.local_blocks) == (520, 520)
    assert found.report.num_reservations == 1
    snapshot = {Tier.DEVICE: chain[:530], Tier.DISK: chain}
    assert await index.replace(worker.id, worker.epoch, 9, snapshot) is PublishResult.APPLIED
    [found] = await index.match({ROOT.seed: chain})
    assert (found.device_blocks, found.local_blocks) == (530, 600)
    assert [s.info for s in await index.workers()] == [worker]
    successor = replace(worker, epoch=create_worker(epoch=3).epoch)
    assert await index.register(successor, 60_000) is RegisterResult.FRESH
    assert await index.register(worker, 60_000) is RegisterResult.SUPERSEDED
    await index.deregister(successor.id, successor.epoch)
    assert await index.workers() == []
