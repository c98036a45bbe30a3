"""A gateway's and a decode worker's side of a worker's service, for tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from core.ids import RequestId
from core.request import Request, SamplingParams
from core.worker_info import Role
from engine.config import EngineConfig
from services.rpc.channel import open_channel
from services.rpc.codec import encode_request
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1 import baton_pb2_grpc as pb_grpc
from services.worker.config import WorkerConfig
from services.worker.front import WorkerFront
from tests.support import fake_engine


def make_request(request_id: str, **changes: Any) -> Request:
    sampling = {"seed": 1, "max_tokens": 4} | changes.pop("sampling", {})
    fields = {"model": "fake", "prompt_token_ids": (5, 6, 7)} | changes
    return Request(RequestId(request_id), sampling=SamplingParams(**sampling), **fields)


def worker_config(role: Role = Role.MIXED, **changes: Any) -> WorkerConfig:
    return WorkerConfig(EngineConfig("fake", role=role), **changes)


def make_front(*options: str, role: Role = Role.MIXED, **changes: Any) -> WorkerFront:
    return WorkerFront(worker_config(role, **changes), engine_command=fake_engine.command(*options))


@dataclass
class GatewayEnd:
    """One Serve stream, with everything that came back sorted by request and choice."""

    call: Any
    hello: pb.WorkerHello
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    endings: dict[tuple[str, int], pb.ChoiceOutput] = field(default_factory=dict)
    loads: list[pb.LoadReport] = field(default_factory=list)
    steps: list[pb.StepOutputs] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, request: Request, candidates: tuple[str, ...] = ()) -> None:
        entries = [pb.PrefillCandidate(control_address=address) for address in candidates]
        submit = pb.Submit(request=encode_request(request), prefill_candidates=entries)
        await self.call.write(pb.GatewayFrame(submit=submit))

    async def cancel(self, request_id: str) -> None:
        await self.call.write(pb.GatewayFrame(cancel=pb.Cancel(request_id=request_id)))

    async def ending(self, request_id: str, choice: int = 0) -> pb.ChoiceOutput:
        async with asyncio.timeout(10):
            while (request_id, choice) not in self.endings:
                self.changed.clear()
                await self.changed.wait()
        return self.endings[request_id, choice]

    async def read(self) -> None:
        while (frame := await self.call.read()) is not grpc.aio.EOF:
            if frame.WhichOneof("frame") == "load":
                self.loads.append(frame.load)
            else:
                self.steps.append(frame.step)
                for output in frame.step.outputs:
                    self._note(output)
            self.changed.set()

    def _note(self, output: pb.ChoiceOutput) -> None:
        key = (output.request_id, output.choice)
        self.tokens.setdefault(key, []).extend(output.token_ids)
        if output.finish_reason:
            self.endings[key] = output


@asynccontextmanager
async def gateway(
    front: WorkerFront, gateway_id: str = "gateway-1", version: int = PROTOCOL_VERSION
) -> AsyncIterator[GatewayEnd]:
    """Open a Serve stream; leaving the block cancels it."""
    async with open_channel(front.control_address) as channel:
        call = pb_grpc.WorkerStub(channel).Serve()
        hello = pb.GatewayHello(protocol_version=version, gateway_id=gateway_id)
        await call.write(pb.GatewayFrame(hello=hello))
        first = await call.read()
        end = GatewayEnd(call, first.hello)
        reader = asyncio.create_task(end.read())
        try:
            yield end
        finally:
            reader.cancel()
            call.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def eventually(condition: Any, seconds: float = 10.0) -> None:
    """Wait until `condition()` is true, or its result once awaited."""
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if await value if inspect.isawaitable(value) else value:
                return
            await asyncio.sleep(0.01)
