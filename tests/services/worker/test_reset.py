"""ResetPrefixCache: the engine's tiers are empty when it is answered, and the index hears of it."""

from collections.abc import Iterator

import grpc.aio
import httpx
import pytest

from core.block_hash import hash_chain
from core.errors import EngineDeadError
from kvindex.config import IndexConfig
from kvindex.connect import connect_index
from services.cluster.valkey import ValkeyServer
from services.rpc.channel import open_channel
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.status import error_of_status
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1.baton_pb2_grpc import WorkerStub
from services.worker.front import WorkerFront
from tests.support.valkey import running_valkey
from tests.support.worker_calls import eventually, gateway, make_front, make_request

PROMPT = tuple(range(3, 3 + 129))
"""Eight blocks: four on the device, six in the host tier, eight on disk."""

REQUEST = pb.ResetPrefixCacheRequest(protocol_version=PROTOCOL_VERSION)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with running_valkey() as started:
        yield started


async def snapshot(stub: WorkerStub) -> dict[str, int]:
    """Hashes a tier, as the Snapshot call tells."""
    frames = [frame async for frame in stub.Snapshot(pb.SnapshotRequest())]
    return {frame.tier: len(frame.hashes) // 16 for frame in frames if frame.hashes}


async def serve_one(front: WorkerFront, request_id: str) -> None:
    async with gateway(front) as end:
        await end.submit(make_request(request_id, prompt_token_ids=PROMPT))
        await end.ending(request_id)


async def test_a_reset_empties_every_tier_here_and_in_the_index(server: ValkeyServer) -> None:
    config = IndexConfig(redis_url=server.url, publish_interval_ms=1)
    index = connect_index(config)
    async with (
        make_front("--tiers", index=config) as front,
        open_channel(front.control_address) as channel,
    ):
        stub, root = WorkerStub(channel), front.info.hash_root
        chain = hash_chain(root, PROMPT)

        async def lengths() -> tuple[int, int]:
            [found] = await index.match({root.seed: chain})
            return found.device_blocks, found.local_blocks

        for turn in ("r1", "r2"):  # what comes after a reset is kept and told as before it
            await serve_one(front, turn)
            assert await snapshot(stub) == {"device": 4, "host": 6, "disk": 8}

            async def is_told() -> bool:
                return await lengths() == (4, 8)

            await eventually(is_told)
            answer = await stub.ResetPrefixCache(REQUEST)
            assert (answer.epoch, answer.num_kept_blocks) == (front.info.epoch, 0)
            assert await snapshot(stub) == {}

            async def is_forgotten() -> bool:
                return await lengths() == (0, 0)

            await eventually(is_forgotten)
    await index.close()


@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 2), (32, 1)])
async def test_blocks_that_stay_are_counted(block_size: int, num_blocks: int) -> None:
    """An engine that drops nothing has two hashes left."""
    front = make_front("--block-size", str(block_size))
    async with front, open_channel(front.control_address) as channel:
        answer = await WorkerStub(channel).ResetPrefixCache(REQUEST)
        assert answer.num_kept_blocks == num_blocks


async def test_a_far_version_and_a_dead_engine_are_told_by_name() -> None:
    async with make_front("--die-on-request", "r1") as front:
        async with open_channel(front.control_address) as channel:
            stub = WorkerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="protocol version 7"):
                await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(protocol_version=7))
            async with gateway(front) as end:
                await end.submit(make_request("r1"))
                with pytest.raises(Exception, match="engine"):
                    await front.run()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ResetPrefixCache(REQUEST)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert isinstance(error_of_status(caught.value, "w"), EngineDeadError)


async def test_the_workers_own_http_port_does_not_offer_it() -> None:
    async with make_front(metrics_port=0) as front, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{front.metrics_port}/reset_prefix_cache"
        assert (await client.post(url)).status_code == 405
        assert (await client.get(url)).status_code == 404
