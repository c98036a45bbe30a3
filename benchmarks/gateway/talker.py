"""A worker without a model: each step gives every running request one random token, in one frame.

Run as a process of its own: `python -m benchmarks.gateway.talker STEP_MS`. Prints its address.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from core.block_hash import HashRoot
from core.ids import Epoch, WorkerId
from core.kv_identity import GroupShape, KVIdentity
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from core.worker_info import Role, WorkerInfo
from engine.loading.gguf_file import GgufFile
from engine.loading.gguf_tokenizer import build_bundle
from services.cli import demo_model
from services.rpc.bundle import bundle_digest, iter_pieces
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.record_codec import encode_record
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1 import baton_pb2_grpc as pb_grpc

MODEL = "talker"


class Talker(pb_grpc.WorkerServicer):
    """Serves every stream with one loop of steps."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._bundle = build_bundle(GgufFile(demo_model.path()))
        self._words = random.Random(7).sample(range(100, 40_000), 4096)

    def describe(self, address: str) -> None:
        """Make the record, now that the address is known."""
        identity = KVIdentity("digest", "float32", "float32", "", (GroupShape("full", 1, 1, 8),))
        group = KVGroup(GroupKind.FULL_ATTENTION, (0,), 1, SlotFormat("plain", "float32", 8))
        self._record = encode_record(
            WorkerInfo(
                WorkerId("talker"),
                Epoch(1),
                Role.MIXED,
                address,
                (),
                (MODEL,),
                bundle_digest(self._bundle),
                8192,
                identity,
                KVLayout(16, (group,)),
                HashRoot.of(identity),
                100_000,
            )
        )

    async def Describe(
        self, request: pb.DescribeRequest, context: Any
    ) -> AsyncIterator[pb.DescribeFrame]:
        """Record and bundle."""
        yield pb.DescribeFrame(record=self._record)
        if request.with_bundle:
            for piece in iter_pieces(self._bundle):
                yield pb.DescribeFrame(piece=piece)

    async def Serve(self, frames: AsyncIterator[pb.GatewayFrame], context: Any) -> None:
        """Talk to everybody until the gateway leaves."""
        await anext(frames)
        hello = pb.WorkerHello(protocol_version=PROTOCOL_VERSION, record=self._record)
        await context.write(pb.WorkerFrame(hello=hello))
        left: dict[str, int] = {}
        talking = asyncio.create_task(self._talk(context, left))
        try:
            async for frame in frames:
                if frame.HasField("submit"):
                    left[frame.submit.request.id] = frame.submit.request.sampling.max_tokens
                elif frame.HasField("cancel"):
                    left.pop(frame.cancel.request_id, None)
        finally:
            talking.cancel()

    async def _talk(self, context: Any, left: dict[str, int]) -> None:
        number = 0
        while True:
            await asyncio.sleep(self._step_s)
            outputs = []
            for place, request_id in enumerate(list(left)):
                left[request_id] -= 1
                word = self._words[(number + place) % len(self._words)]
                is_last = left[request_id] <= 0
                reason = "length" if is_last else ""
                outputs.append(
                    pb.ChoiceOutput(request_id=request_id, token_ids=[word], finish_reason=reason)
                )
                if is_last:
                    del left[request_id]
            number += 1
            if outputs:
                await context.write(pb.WorkerFrame(step=pb.StepOutputs(outputs=outputs)))


async def _serve(step_s: float) -> None:
    talker = Talker(step_s)
    server = grpc.aio.server()
    pb_grpc.add_WorkerServicer_to_server(talker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    talker.describe(f"127.0.0.1:{port}")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]) / 1000))
