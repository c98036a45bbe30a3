"""One stream to one worker: hello, requests out, steps in, loss."""

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import DeadlineExceeded, ServeError, WorkerLostError
from core.ids import Epoch, RequestId
from core.request import Request, SamplingParams
from services.gateway.legs.connection import GatewayIdentity, WorkerConnection
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.record_codec import encode_record
from services.rpc.v1 import baton_pb2 as pb
from tests.support.fake_worker import FakeWorker, make_info, running_worker, say
from tests.support.gateways import eventually

ROOT = Path(__file__).parents[4]
IDENTITY = GatewayIdentity("gateway", Epoch(7))
ENDLESS = say("one two ", ends=False, delay_s=0.005)


def request(name: str, deadline_ms: int | None = None, **sampling: Any) -> Request:
    params = SamplingParams(**({"seed": 1, "max_tokens": 2000} | sampling))
    return Request(RequestId(name), "fake", (5, 6), params, deadline_ms=deadline_ms)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[WorkerConnection]:
    connection = WorkerConnection(address, IDENTITY, lambda _: None)
    try:
        await eventually(lambda: connection.is_ready, "ready")
        yield connection
    finally:
        await connection.close()


async def read_all(active) -> list[int]:
    tokens: list[int] = []
    while not active.is_finished:
        for output in await active.receive():
            tokens += output.token_ids
    return tokens


async def test_the_hello_brings_the_record():
    async with running_worker(say("x")) as worker, connected(worker.address) as connection:
        assert connection.info == worker.info
        assert connection.down_s() == 0
        assert worker.num_streams == 1


async def test_requests_share_a_stream_and_are_kept_apart():
    async with running_worker(say("the capital of France")) as worker:
        async with connected(worker.address) as connection:
            actives = [connection.submit(request(f"r{n}"), []) for n in range(20)]
            answers = await asyncio.gather(*map(read_all, actives))
            assert {tuple(answer) for answer in answers} == {tuple(answers[0])}
            for active in actives:
                active.close("read")
            assert connection.num_requests == 0
            assert worker.num_streams == 1
            assert worker.cancelled == []


async def test_prefill_candidates_travel_in_order():
    first = make_info("p1", control_address="10.0.0.1:1")
    second = make_info("p2", control_address="10.0.0.2:2")
    async with running_worker(say("x")) as worker, connected(worker.address) as connection:
        await read_all(connection.submit(request("r"), [first, second]))
        sent = worker.submits[0].prefill_candidates
        assert [(c.worker_id, c.control_address) for c in sent] == [
            ("p1", "10.0.0.1:1"),
            ("p2", "10.0.0.2:2"),
        ]


async def test_closing_early_cancels_at_the_worker_once():
    async with running_worker(ENDLESS) as worker, connected(worker.address) as connection:
        active = connection.submit(request("r"), [])
        await active.receive()
        active.close("enough")
        active.close("enough")
        await eventually(lambda: worker.cancelled == ["r"], "cancelled")
        await eventually(lambda: worker.num_running == 0, "stopped")
        assert connection.num_requests == 0


async def test_a_lost_stream_ends_every_request_and_is_opened_again():
    worker = FakeWorker(ENDLESS)
    await worker.start()
    port = int(worker.address.rpartition(":")[2])
    async with connected(worker.address) as connection:
        actives = [connection.submit(request(f"r{n}"), []) for n in range(3)]
        for active in actives:
            await active.receive()
        await worker.stop()
        for active in actives:
            with pytest.raises(WorkerLostError):
                await read_all(active)
            with pytest.raises(WorkerLostError):
                await active.receive()
        assert not connection.is_ready
        with pytest.raises(WorkerLostError, match="is not connected"):
            connection.submit(request("late"), [])
        again = FakeWorker(say("x"), epoch=Epoch(2))
        await again.start(port)
        try:
            await eventually(lambda: connection.is_ready, "ready again")
            assert connection.info is not None
            assert connection.info.epoch == 2
            assert await read_all(connection.submit(request("new"), []))
        finally:
            await again.stop()


KILLED_WORKER = """
import asyncio
from tests.support.fake_worker import FakeWorker, say

async def main():
    worker = FakeWorker(say("one two ", ends=False, delay_s=0.002))
    await worker.start()
    print(worker.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def worker_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A worker that can be killed, and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED_WORKER, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("posts_after_the_end", [True, False])
async def test_a_worker_that_is_killed_under_load_leaves_nothing_behind(
    posts_after_the_end, caplog
):
    """No task and no complaint: what wrote to the lost stream has ended with it."""
    async with worker_process() as (process, address), connected(address) as connection:
        actives = [connection.submit(request(f"r{n}"), []) for n in range(50)]
        for active in actives:
            await active.receive()
        process.kill()
        if posts_after_the_end:
            actives += [connection.submit(request(f"late{n}"), []) for n in range(200)]
        for active in actives:
            with pytest.raises(WorkerLostError):
                await read_all(active)
        await eventually(lambda: not connection.is_ready, "lost")
        await connection.close()
        left = {task.get_name() for task in asyncio.all_tasks()}
        assert not [name for name in left if address in name]
        for _ in range(
            3
        ):  # what was left to the collector would complain now, through the event loop
            gc.collect()
            await asyncio.sleep(0.01)
    complaints = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert complaints == []


async def test_frames_wait_for_a_worker_that_reads_slowly_and_keep_their_order():
    """More than a stream takes at once is posted to a worker that does not read; then it reads."""
    may_read = asyncio.Event()

    class Slow(FakeWorker):
        async def Serve(self, frames: AsyncIterator[pb.GatewayFrame], context: Any) -> None:
            async def read() -> AsyncIterator[pb.GatewayFrame]:
                yield await anext(frames)
                await may_read.wait()
                async for frame in frames:
                    yield frame

            await super().Serve(read(), context)

    worker = Slow(say("x"))
    await worker.start()
    try:
        async with connected(worker.address) as connection:
            prompt = tuple(range(20_000))
            actives = [
                connection.submit(replace(request(f"r{n}"), prompt_token_ids=prompt), [])
                for n in range(40)
            ]
            actives[7].close("not wanted")
            await asyncio.sleep(0.05)
            assert connection.is_ready
            assert worker.submits == []
            may_read.set()
            for n, active in enumerate(actives):
                if n != 7:
                    assert await read_all(active)
            assert [submit.request.id for submit in worker.submits] == [f"r{n}" for n in range(40)]
            assert worker.cancelled == ["r7"]
    finally:
        await worker.stop()


async def test_a_frame_that_cannot_be_written_ends_the_stream_and_not_the_connection(
    monkeypatch, caplog
):
    async with running_worker(ENDLESS) as worker, connected(worker.address) as connection:
        active = connection.submit(request("r"), [])
        await active.receive()

        async def broken(*_: object) -> None:
            raise ValueError("a mistake of ours")

        with monkeypatch.context() as patch:
            patch.setattr("grpc.aio._call._StreamRequestMixin.write", broken)
            connection.submit(request("unwritten"), [])
            with pytest.raises(WorkerLostError):
                await read_all(active)
        await eventually(lambda: connection.is_ready, "ready again")
        assert "a frame could not be written" in caplog.text
        again = connection.submit(request("again"), [])
        assert await again.receive()


async def test_time_limits_are_kept_here_also_when_the_worker_is_silent():
    async def silence(_: pb.Request) -> AsyncIterator[list[pb.ChoiceOutput]]:
        await asyncio.sleep(60)
        yield []

    async with running_worker(silence) as worker, connected(worker.address) as connection:
        active = connection.submit(request("r", deadline_ms=50), [])
        with pytest.raises(DeadlineExceeded):
            await active.receive()
        await eventually(lambda: worker.cancelled == ["r"], "cancelled")


async def test_every_request_is_given_up_when_a_worker_falls_silent():
    """Those that have said something too: another worker goes on with them, and this one is told to stop."""
    async with running_worker(ENDLESS) as worker, connected(worker.address) as connection:
        spoken = connection.submit(request("spoken"), [])
        await spoken.receive()
        worker.is_silent = True
        waiting = connection.submit(request("waiting"), [])
        connection.fail_requests("silent")
        for active in (spoken, waiting):
            with pytest.raises(WorkerLostError, match="silent"):
                await active.receive()
        await eventually(lambda: sorted(worker.cancelled) == ["spoken", "waiting"], "cancelled")
        assert connection.num_requests == 0


async def test_load_reports_are_kept():
    class Reporting(FakeWorker):
        async def _write(self, context: Any, steps: asyncio.Queue[pb.WorkerFrame]) -> None:
            report = pb.LoadReport(num_running=3, waiting_prefill_tokens=70)
            await context.write(pb.WorkerFrame(load=report))
            await super()._write(context, steps)

    worker = Reporting(say("x"))
    await worker.start()
    try:
        async with connected(worker.address) as connection:
            await eventually(lambda: connection.load, "load")
            assert connection.load is not None
            assert connection.load.num_running == 3
            assert connection.load.waiting_prefill_tokens == 70
    finally:
        await worker.stop()


@pytest.mark.parametrize(
    "frame",
    [
        pb.WorkerFrame(step=pb.StepOutputs()),
        pb.WorkerFrame(
            hello=pb.WorkerHello(
                protocol_version=PROTOCOL_VERSION + 2, record=encode_record(make_info())
            )
        ),
    ],
    ids=["no hello", "other version"],
)
async def test_strangers_are_not_connected_to(frame):
    class Stranger(FakeWorker):
        async def Serve(self, frames: AsyncIterator[pb.GatewayFrame], context: Any) -> None:
            self.num_streams += 1
            await context.write(frame)
            await asyncio.sleep(60)

    worker = Stranger(say("x"))
    await worker.start()
    connection = WorkerConnection(worker.address, IDENTITY, lambda _: None)
    try:
        await eventually(lambda: worker.num_streams > 1, "tried again")
        assert not connection.is_ready
        assert connection.down_s() > 0
    finally:
        await connection.close()
        await worker.stop()


async def test_an_error_given_to_a_request_is_what_its_reader_sees():
    async with running_worker(ENDLESS) as worker, connected(worker.address) as connection:
        active = connection.submit(request("r"), [])
        await active.receive()
        active.fail(ServeError("because"))
        active.fail(ServeError("again"))
        with pytest.raises(ServeError, match="because"):
            await active.receive()
