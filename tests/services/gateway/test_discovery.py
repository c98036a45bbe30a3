"""Workers from the index, from seeds, from both; who counts as alive."""

import asyncio

from core.ids import Epoch
from core.worker_info import WorkerLoad
from kvindex.memory import MemoryIndex
from tests.support.fake_worker import FakeWorker, running_worker, say
from tests.support.gateways import asgi_gateway, eventually

LONG_MS, SHORT_MS = 60_000, 150


async def register(index: MemoryIndex, worker: FakeWorker, lease_ms: int = LONG_MS) -> None:
    await index.register(worker.info, lease_ms)
    await index.heartbeat(worker.info.id, worker.info.epoch, WorkerLoad(), lease_ms)


async def test_workers_of_the_index_are_found_without_seeds():
    index = MemoryIndex()
    async with running_worker(say("x"), "w1") as w1, running_worker(say("x"), "w2") as w2:
        await register(index, w1)
        async with asgi_gateway(w1, index=index, seeds=()) as gateway:
            await register(index, w2)
            await gateway.wait_for_workers(2)


async def test_a_worker_in_index_and_seeds_gets_one_stream():
    index = MemoryIndex()
    async with running_worker(say("x"), "w1") as w1:
        await register(index, w1)
        async with asgi_gateway(w1, index=index) as gateway:
            await asyncio.sleep(0.2)
            assert w1.num_streams == 1
            assert w1.num_bundles_sent == 1
            assert len(gateway.state.directory.live_workers()) == 1


async def test_a_name_stands_for_all_its_addresses():
    async with running_worker(say("x"), "w1") as w1:
        port = w1.address.rpartition(":")[2]
        async with asgi_gateway(w1, seeds=(f"localhost:{port}",)) as gateway:
            assert (await gateway.chat()).status_code == 200
            await asyncio.sleep(0.15)
            assert w1.num_streams == 1


async def test_workers_of_one_model_share_a_bundle():
    async with running_worker(say("x"), "w1") as w1, running_worker(say("x"), "w2") as w2:
        async with asgi_gateway(w1, w2):
            assert w1.num_bundles_sent + w2.num_bundles_sent == 1


async def test_a_bundle_whose_digest_is_wrong_is_not_served():
    worker = FakeWorker(say("x"))
    worker.bundle = worker.bundle | {"generation_config.json": b"{}"}
    await worker.start()
    try:
        async with asgi_gateway(seeds=(worker.address,)) as gateway:
            await eventually(lambda: worker.num_bundles_sent, "fetched")
            await asyncio.sleep(0.1)
            assert (await gateway.client.get("/health")).status_code == 503
            assert (await gateway.chat()).status_code == 503
    finally:
        await worker.stop()


async def test_a_lapsed_lease_takes_a_silent_worker_out():
    index = MemoryIndex()
    async with running_worker(say("x"), "w1") as w1:
        await register(index, w1, SHORT_MS)
        config = {"seeds": (), "silence_limit_ms": 100}
        async with asgi_gateway(w1, index=index, **config) as gateway:
            await gateway.wait_for_workers(0)
            assert (await gateway.chat()).status_code == 503
            await register(index, w1)
            await gateway.wait_for_workers(1)


async def test_a_lapsed_lease_is_no_death_while_the_stream_speaks():
    """A worker that cannot reach the index still serves."""
    index = MemoryIndex()
    endless = say("one ", ends=False, delay_s=0.01)
    async with running_worker(endless, "w1") as w1:
        await register(index, w1, SHORT_MS)
        config = {"seeds": (), "silence_limit_ms": 500}
        async with asgi_gateway(w1, index=index, **config) as gateway:
            running = asyncio.create_task(gateway.complete(max_tokens=60))
            await asyncio.sleep(0.4)
            assert not await index.workers()
            assert len(gateway.state.directory.live_workers()) == 1
            assert (await running).status_code == 200


async def test_a_seed_that_was_never_leased_lives_by_its_stream():
    async with running_worker(say("x"), "w1") as w1:
        config = {"silence_limit_ms": 100}
        async with asgi_gateway(w1, index=MemoryIndex(), **config) as gateway:
            await asyncio.sleep(0.3)
            assert (await gateway.chat()).status_code == 200


async def test_a_worker_that_moved_is_followed():
    index = MemoryIndex()
    first = FakeWorker(say("x"), "w1")
    await first.start()
    await register(index, first)
    async with asgi_gateway(first, index=index, seeds=()) as gateway:
        await first.stop()
        await gateway.wait_for_workers(0)
        async with running_worker(say("x"), "w1", epoch=Epoch(2)) as second:
            assert second.address != first.address
            await register(index, second)
            await gateway.wait_for_workers(1)
            assert (await gateway.chat()).status_code == 200
            assert second.submits


async def test_a_worker_of_whom_nothing_is_left_is_forgotten(monkeypatch):
    monkeypatch.setattr("services.gateway.discovery._FORGET_AFTER_S", 0.1)
    monkeypatch.setattr("services.gateway.discovery._MAINTAIN_INTERVAL_MS", 20)
    index = MemoryIndex()
    worker = FakeWorker(say("x"), "w1")
    await worker.start()
    await register(index, worker)
    async with asgi_gateway(worker, index=index, seeds=()) as gateway:
        await worker.stop()
        await asyncio.sleep(0.3)
        assert gateway.state.directory.known_workers(), "its lease still runs"
        await index.deregister(worker.info.id, worker.info.epoch)
        await eventually(lambda: not gateway.state.directory.known_workers(), "forgotten")
