"""A gateway over a real Redis-compatible server that hangs, dies and comes back."""

import asyncio
import time

import pytest

from core.worker_info import WorkerLoad
from kvindex.config import IndexConfig
from kvindex.redis_index import RedisIndex
from tests.support.fake_worker import FakeWorker, running_worker, say
from tests.support.gateways import Gateway, asgi_gateway
from tests.support.valkey import running_valkey

PROMPT = list(range(3, 90))


def index_config(url: str) -> IndexConfig:
    return IndexConfig(redis_url=url, command_timeout_ms=250, retry_interval_ms=100)


async def register(index: RedisIndex, *workers: FakeWorker) -> None:
    for worker in workers:
        info = worker.info
        await index.register(info, 60_000)
        await index.heartbeat(info.id, info.epoch, WorkerLoad(), 60_000)


async def check_served_from_local_view(gateway: Gateway) -> None:
    for n in range(4):
        started = time.monotonic()
        assert (await gateway.complete(prompt=[5 + n, *PROMPT])).status_code == 200
        assert time.monotonic() - started < 1
    await gateway.wait_for(lambda: not gateway.state.directory.index_is_connected)
    health = await gateway.client.get("/health")
    assert (health.status_code, health.json()["index"][:4]) == (200, "away")


async def check_prefix_draws_requests(gateway: Gateway, *workers: FakeWorker) -> None:
    """One request tells the index what its worker holds; from then on others follow it."""
    await gateway.wait_for(lambda: gateway.state.directory.index_is_connected)
    first = await _owner(gateway, workers)
    for _ in range(4):
        assert await _owner(gateway, workers) is first


async def _owner(gateway: Gateway, workers: tuple[FakeWorker, ...]) -> FakeWorker:
    before = [len(worker.submits) for worker in workers]
    assert (await gateway.complete(prompt=[9, *PROMPT])).status_code == 200
    await gateway.state.router.close()  # what it told the index has arrived
    (owner,) = (w for w, count in zip(workers, before, strict=True) if len(w.submits) > count)
    return owner


@pytest.mark.parametrize("way", ["killed", "hanging"])
async def test_requests_go_on_without_it_and_cache_routing_returns_with_it(way):
    async with running_worker(say("x"), "w1") as w1, running_worker(say("x"), "w2") as w2:
        with running_valkey() as server:
            index = RedisIndex(index_config(server.url))
            await register(index, w1, w2)
            own = RedisIndex(index_config(server.url))
            async with asgi_gateway(w1, w2, index=own, seeds=()) as gateway:
                await check_prefix_draws_requests(gateway, w1, w2)
                server.kill() if way == "killed" else server.pause()
                await check_served_from_local_view(gateway)
                server.restart() if way == "killed" else server.resume()
                await register(index, w1, w2)
                await check_prefix_draws_requests(gateway, w1, w2)
            await index.close()


async def test_a_cluster_whose_redis_is_absent_serves_from_seeds_and_joins_later(held_port: int):
    url = f"redis://127.0.0.1:{held_port}/0"
    async with running_worker(say("x"), "w1") as w1:
        async with asgi_gateway(w1, index=RedisIndex(index_config(url))) as gateway:
            assert (await gateway.chat()).status_code == 200
            assert not gateway.state.directory.index_is_connected
            with running_valkey(port=held_port) as server:
                index = RedisIndex(index_config(server.url))
                async with running_worker(say("x"), "w2") as w2:
                    await register(index, w1, w2)
                    await gateway.wait_for_workers(2)
                    assert gateway.state.directory.index_is_connected
                    await asyncio.gather(*(gateway.chat() for _ in range(6)))
                    assert w2.submits
                await index.close()
