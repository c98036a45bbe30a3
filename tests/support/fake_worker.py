"""A worker in this process: the real protocol over a real port, tokens by script.

A script is an async generator over the submitted request; each item is the outputs of one engine step. What a gateway
sent is kept in lists, so that tests can ask for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from core.block_hash import HashRoot
from core.ids import Epoch, WorkerId
from core.kv_identity import GroupShape, KVIdentity
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from core.worker_info import Role, WorkerInfo
from services.rpc.bundle import bundle_digest, iter_pieces
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.record_codec import encode_record
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1 import baton_pb2_grpc as pb_grpc
from tests.support.text_bundles import EOS, small_bundle, small_tokenizer

Script = Callable[[pb.Request], AsyncIterator[list[pb.ChoiceOutput]]]


def make_info(worker_id: str = "w1", **changes: Any) -> WorkerInfo:
    identity = KVIdentity("digest", "float32", "float32", "", (GroupShape("full", 2, 2, 8),))
    group = KVGroup(GroupKind.FULL_ATTENTION, (0, 1), 2, SlotFormat("plain", "float32", 8))
    fields: dict[str, Any] = {
        "epoch": Epoch(1),
        "role": Role.MIXED,
        "control_address": "127.0.0.1:1",
        "data_addresses": (),
        "models": ("fake",),
        "model_bundle_digest": bundle_digest(small_bundle()),
        "max_model_len": 2048,
        "identity": identity,
        "layout": KVLayout(16, (group,)),
        "hash_root": HashRoot.of(identity),
        "num_blocks": 100,
    }
    return WorkerInfo(WorkerId(worker_id), **(fields | changes))


def output(
    request: pb.Request, token_ids: Sequence[int], choice: int = 0, **fields: Any
) -> pb.ChoiceOutput:
    return pb.ChoiceOutput(request_id=request.id, choice=choice, token_ids=token_ids, **fields)


def logprobs_for(request: pb.Request, token_ids: Iterable[int]) -> list[pb.TokenLogprobs]:
    """Made-up log-probabilities: -0.5 for the chosen token, then -1.5, -2.5 ..."""
    if not request.sampling.HasField("logprobs"):
        return []
    count = request.sampling.logprobs
    return [
        pb.TokenLogprobs(
            logprob=-0.5,
            rank=1,
            top_token_ids=[(token_id + place) % 300 for place in range(count)],
            top_logprobs=[-0.5 - place for place in range(count)],
        )
        for token_id in token_ids
    ]


def say(
    text: str,
    *,
    tokens_a_step: int = 1,
    delay_s: float = 0.0,
    ends: bool = True,
    cached: int = 0,
) -> Script:
    """Every choice says `text`, then EOS unless max_tokens cuts it; `ends` False goes on for ever.

    A request that has output tokens already hears what comes after them.
    """
    return speak(small_tokenizer().encode(text).ids, tokens_a_step, delay_s, ends, cached)


def speak(
    spoken: list[int],
    tokens_a_step: int = 1,
    delay_s: float = 0.0,
    ends: bool = True,
    cached: int = 0,
) -> Script:
    eos = small_tokenizer().token_to_id(EOS)

    async def script(request: pb.Request) -> AsyncIterator[list[pb.ChoiceOutput]]:
        most = request.sampling.max_tokens
        ids = [*spoken, eos] if ends else spoken * (most // len(spoken) + 1)
        reason = "stop" if len(ids) <= most and ends else "length"
        ids = ids[:most]
        had = [list(tokens.token_ids) for tokens in request.output_token_ids]
        assert all(tokens == ids[: len(tokens)] for tokens in had), "not what this worker says"
        starts = [len(tokens) for tokens in had] or [0] * request.sampling.n
        for step in range(0, len(ids) - min(starts), tokens_a_step):
            outputs = []
            for choice, start in enumerate(starts):
                part = ids[start + step : start + step + tokens_a_step]
                if not part:
                    continue
                is_last = start + step + tokens_a_step >= len(ids)
                outputs.append(
                    output(
                        request,
                        part,
                        choice,
                        logprobs=logprobs_for(request, part),
                        finish_reason=reason if is_last else "",
                        num_cached_tokens=cached if step == 0 else None,
                    )
                )
            yield outputs
            await asyncio.sleep(delay_s)

    return script


def refuse(kind: str, message: str) -> Script:
    async def script(request: pb.Request) -> AsyncIterator[list[pb.ChoiceOutput]]:
        yield [output(request, [], finish_reason="error", error_kind=kind, error_message=message)]

    return script


class FakeWorker(pb_grpc.WorkerServicer):
    """One worker. `script` may be changed at any time."""

    def __init__(
        self,
        script: Script,
        worker_id: str = "w1",
        bundle: dict[str, bytes] | None = None,
        **info: Any,
    ) -> None:
        self.script = script
        self.bundle = small_bundle() if bundle is None else bundle
        self.info = make_info(worker_id, model_bundle_digest=bundle_digest(self.bundle), **info)
        self.submits: list[pb.Submit] = []
        self.cancelled: list[str] = []
        self.num_running = 0
        self.num_streams = 0
        self.num_bundles_sent = 0
        self.num_resets = 0
        self.reset_delay_s = 0.0
        self.is_silent = False
        self._server: grpc.aio.Server | None = None
        self._runs: dict[str, asyncio.Task[None]] = {}

    @property
    def address(self) -> str:
        return self.info.control_address

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_WorkerServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        fields = {name: getattr(self.info, name) for name in WorkerInfo.__slots__ if name != "id"}
        fields["control_address"] = f"127.0.0.1:{bound}"
        self.info = WorkerInfo(self.info.id, **fields)
        await self._server.start()

    async def stop(self) -> None:
        for run in list(self._runs.values()):
            run.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)

    async def Describe(
        self, request: pb.DescribeRequest, context: Any
    ) -> AsyncIterator[pb.DescribeFrame]:
        yield pb.DescribeFrame(record=encode_record(self.info))
        if request.with_bundle:
            self.num_bundles_sent += 1
            for piece in iter_pieces(self.bundle):
                yield pb.DescribeFrame(piece=piece)

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.ResetPrefixCacheAnswer:
        assert request.protocol_version == PROTOCOL_VERSION
        await asyncio.sleep(self.reset_delay_s)
        self.num_resets += 1
        return pb.ResetPrefixCacheAnswer(epoch=self.info.epoch, num_kept_blocks=self.num_running)

    async def Serve(self, frames: AsyncIterator[pb.GatewayFrame], context: Any) -> None:
        first = await anext(frames)
        assert first.hello.protocol_version == PROTOCOL_VERSION
        record = encode_record(self.info)
        hello = pb.WorkerHello(protocol_version=PROTOCOL_VERSION, record=record)
        await context.write(pb.WorkerFrame(hello=hello))
        self.num_streams += 1
        steps: asyncio.Queue[pb.WorkerFrame] = asyncio.Queue()
        writing = asyncio.create_task(self._write(context, steps))
        mine: set[str] = set()
        try:
            async for frame in frames:
                if frame.HasField("submit"):
                    mine.add(frame.submit.request.id)
                    self._submit(frame.submit, steps)
                elif frame.HasField("cancel"):
                    self._cancel(frame.cancel.request_id)
        finally:
            writing.cancel()
            self.num_streams -= 1
            for request_id in mine:
                run = self._runs.get(request_id)
                if run is not None:
                    run.cancel()

    async def _write(self, context: Any, steps: asyncio.Queue[pb.WorkerFrame]) -> None:
        while True:
            await context.write(await steps.get())

    def _submit(self, submit: pb.Submit, steps: asyncio.Queue[pb.WorkerFrame]) -> None:
        self.submits.append(submit)
        run = asyncio.create_task(self._run(submit.request, steps))
        self._runs[submit.request.id] = run
        run.add_done_callback(lambda _: self._runs.pop(submit.request.id, None))

    async def _run(self, request: pb.Request, steps: asyncio.Queue[pb.WorkerFrame]) -> None:
        self.num_running += 1
        try:
            async for outputs in self.script(request):
                if not self.is_silent:
                    steps.put_nowait(pb.WorkerFrame(step=pb.StepOutputs(outputs=outputs)))
        finally:
            self.num_running -= 1

    def _cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        run = self._runs.get(request_id)
        if run is not None:
            run.cancel()


@asynccontextmanager
async def running_worker(
    script: Script, worker_id: str = "w1", **info: Any
) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(script, worker_id, **info)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()
