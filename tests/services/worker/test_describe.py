"""Describe, Snapshot, health, reflection and the HTTP pages: what a worker says of itself."""

import asyncio

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.rpc.bundle import MAX_PIECE_BYTES, BundleBuilder
from services.rpc.channel import open_channel
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.record_codec import decode_record
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1 import baton_pb2_grpc as pb_grpc
from services.worker.front import SERVICE_NAME
from tests.support.fake_model import BUNDLE
from tests.support.worker_calls import eventually, gateway, make_front, make_request


async def test_describe_gives_the_record_and_the_bundle_in_pieces() -> None:
    async with make_front() as front, open_channel(front.control_address) as channel:
        stub = pb_grpc.WorkerStub(channel)
        request = pb.DescribeRequest(protocol_version=PROTOCOL_VERSION, with_bundle=True)
        first, *rest = [frame async for frame in stub.Describe(request)]
        info = decode_record(first.record)
        assert info == front.info
        assert max(len(frame.piece.data) for frame in rest) == MAX_PIECE_BYTES
        builder = BundleBuilder()
        for frame in rest:
            builder.add(frame.piece)
        assert builder.finish(info.model_bundle_digest) == BUNDLE

        request = pb.DescribeRequest(protocol_version=PROTOCOL_VERSION)
        assert len([frame async for frame in stub.Describe(request)]) == 1


async def test_describe_refuses_a_far_version() -> None:
    async with make_front() as front, open_channel(front.control_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="protocol version 5"):
            async for _ in pb_grpc.WorkerStub(channel).Describe(
                pb.DescribeRequest(protocol_version=5)
            ):
                pass


async def test_snapshot_names_epoch_sequence_number_and_hashes() -> None:
    async with make_front() as front, open_channel(front.control_address) as channel:
        stub = pb_grpc.WorkerStub(channel)
        frames = [frame async for frame in stub.Snapshot(pb.SnapshotRequest())]
        assert {frame.epoch for frame in frames} == {front.info.epoch}
        assert frames[0].tier == "device"
        assert frames[0].hashes == bytes(16) + b"\x01" * 16
        assert [frame.last for frame in frames] == [False, True]
        with pytest.raises(grpc.aio.AioRpcError, match="not this worker's"):
            async for _ in stub.Snapshot(pb.SnapshotRequest(epoch=1)):
                pass


async def test_health_follows_the_engine() -> None:
    front = make_front("--die-on-request", "r1")
    starting = asyncio.create_task(front.start())
    serving = health_pb2.HealthCheckResponse
    try:
        await eventually(lambda: front.port)
        async with open_channel(front.control_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            await starting
            assert (await stub.Check(request)).status == serving.SERVING
            running = asyncio.create_task(front.run())
            async with gateway(front) as end:
                await end.submit(make_request("r1"))
                await asyncio.wait([running])
            assert (await stub.Check(request)).status == serving.NOT_SERVING
            assert running.exception() is not None
    finally:
        await front.stop()


async def test_reflection_lists_the_service() -> None:
    async with make_front() as front, open_channel(front.control_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [a async for a in stub.ServerReflectionInfo(iter([request]))]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names


async def test_pages_show_metrics_and_health() -> None:
    async with make_front(metrics_port=0) as front, gateway(front) as end:
        await end.submit(make_request("r1", sampling={"max_tokens": 3}))
        await end.ending("r1")
        base = f"http://127.0.0.1:{front.metrics_port}"
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{base}/metrics")).text
            labels = f'engine="{front.info.id}",model_name="fake"'
            assert f"vllm:generation_tokens_total{{{labels}}} 3.0" in text
            assert f"vllm:num_requests_running{{{labels}}} 0.0" in text
            assert f"baton:open_requests{{{labels}}} 0.0" in text
            assert 'source="external_kv_transfer"' in text
            assert 'block_size="16",cache_dtype="float32"' in text
            assert f"baton:index_connected{{{labels}}} 0.0" in text
            assert 'finished_reason="length",model_name="fake"} 1.0' in text
            assert front.info.data_addresses == ("127.0.0.1:9",), "those that other hosts reach"
            health = (await client.get(f"{base}/health")).json()
            details = {"kernels": "none", "transports": "shm, tcp"}
            assert health == {"status": "ok", "message": "", **details}
            assert (await client.get(f"{base}/nothing")).status_code == 404
            assert (await client.post(f"{base}/health")).status_code == 405


async def test_a_port_in_use_is_named() -> None:
    async with make_front() as front:
        other = make_front(port=front.port)
        with pytest.raises(Exception, match=f"--port: 127.0.0.1:{front.port}"):
            await other.start()
        await other.stop()
