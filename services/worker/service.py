"""The gRPC service of a worker: frames in, frames out. Decides nothing: streams, sessions and
engine do.

Until the engine is ready, and after it died, every call ends with UNAVAILABLE and the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio

from core.block_hash import HASH_BYTES
from core.errors import InvalidRequest, ServeError, WorkerLostError
from core.worker_info import WorkerInfo
from services.rpc.bundle import iter_pieces
from services.rpc.protocol import PROTOCOL_VERSION, check_version
from services.rpc.record_codec import encode_record
from services.rpc.status import abort_with
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1 import baton_pb2_grpc as pb_grpc
from services.worker.gateway_streams import GatewayStream, GatewayStreams
from services.worker.prefill_sessions import PrefillSessions, refused_frame
from services.worker.snapshots import Snapshots
from services.worker.tasks import background

MAX_SNAPSHOT_HASHES = (1 << 20) // HASH_BYTES


@dataclass(slots=True)
class WorkerState:
    """What calls are answered from. info is None while the engine loads; error is set when it is
    dead.
    """

    streams: GatewayStreams
    sessions: PrefillSessions
    snapshots: Snapshots
    info: WorkerInfo | None = None
    bundle: dict[str, bytes] | None = None
    error: ServeError | None = None

    def ready_info(self) -> WorkerInfo:
        """The record; raises why there is none."""
        if self.error is not None:
            raise self.error
        if self.info is None:
            raise WorkerLostError("the worker is still loading its model")
        return self.info


class WorkerService(pb_grpc.WorkerServicer):
    """baton.v1.Worker over the state of one worker."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state

    async def Serve(
        self, frames: AsyncIterator[pb.GatewayFrame], context: grpc.aio.ServicerContext
    ) -> None:
        """One gateway's stream, from its hello to its loss."""
        try:
            info = self._state.ready_info()
            hello = await _hello(frames)
        except ServeError as error:
            await abort_with(context, error)
        streams = self._state.streams
        await context.write(
            pb.WorkerFrame(
                hello=pb.WorkerHello(protocol_version=PROTOCOL_VERSION, record=encode_record(info))
            )
        )
        stream = streams.open(hello.gateway_id)
        try:
            async with background(_read_gateway(streams, stream, frames)):
                while (frame := await stream.next_frame()) is not None:
                    await context.write(frame)
        except ServeError as error:
            await abort_with(context, error)
        finally:
            streams.lose(stream)

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DescribeFrame]:
        """The record, and on demand the files of the bundle in pieces."""
        try:
            check_version(request.protocol_version, "the caller of Describe")
            info = self._state.ready_info()
        except ServeError as error:
            await abort_with(context, error)
        yield pb.DescribeFrame(record=encode_record(info))
        if request.with_bundle:
            for piece in iter_pieces(self._state.bundle or {}):
                yield pb.DescribeFrame(piece=piece)

    async def Prefill(
        self, frames: AsyncIterator[pb.DecodeFrame], context: grpc.aio.ServicerContext
    ) -> None:
        """One session attempt of a decode worker."""
        try:
            info = self._state.ready_info()
        except ServeError as error:
            await context.write(refused_frame(error))
            return
        async with contextlib.aclosing(self._state.sessions.serve(info, frames)) as answers:
            async for answer in answers:
                await context.write(answer)

    async def Snapshot(
        self, request: pb.SnapshotRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SnapshotFrame]:
        """Everything published, tier by tier, packed; the last frame says so."""
        try:
            info = self._state.ready_info()
            if request.epoch not in (0, info.epoch):
                raise InvalidRequest(f"epoch {request.epoch} is not this worker's ({info.epoch})")
            taken = await self._state.snapshots.take()
        except ServeError as error:
            await abort_with(context, error)
        for tier, hashes in taken.hashes.items():
            for start in range(0, len(hashes), MAX_SNAPSHOT_HASHES):
                yield pb.SnapshotFrame(
                    epoch=info.epoch,
                    sequence_number=taken.sequence_number,
                    tier=tier.value,
                    hashes=b"".join(hashes[start : start + MAX_SNAPSHOT_HASHES]),
                )
        yield pb.SnapshotFrame(epoch=info.epoch, sequence_number=taken.sequence_number, last=True)

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResetPrefixCacheAnswer:
        """Drop what is cached and unused; answered when the engine has done it."""
        try:
            check_version(request.protocol_version, "the caller of ResetPrefixCache")
            info = self._state.ready_info()
            left = await self._state.snapshots.reset()
        except ServeError as error:
            await abort_with(context, error)
        num_hashes = sum(len(hashes) for hashes in left.hashes.values())
        num_kept = num_hashes * info.hash_root.block_size // info.layout.block_size
        return pb.ResetPrefixCacheAnswer(epoch=info.epoch, num_kept_blocks=num_kept)


async def _hello(frames: AsyncIterator[pb.GatewayFrame]) -> pb.GatewayHello:
    first = await anext(frames, None)
    if first is None or first.WhichOneof("frame") != "hello":
        raise InvalidRequest("the first frame of a Serve stream must be a hello")
    check_version(first.hello.protocol_version, f"gateway {first.hello.gateway_id!r}")
    return first.hello


async def _read_gateway(
    streams: GatewayStreams, stream: GatewayStream, frames: AsyncIterator[pb.GatewayFrame]
) -> None:
    try:
        async for frame in frames:
            streams.handle(stream, frame)
    finally:
        stream.end()  # the gateway has closed its half: it wants nothing more
