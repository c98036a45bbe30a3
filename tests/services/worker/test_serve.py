"""Serve: requests in, one frame a step out, and the ends of a request and of a stream."""

import asyncio
from pathlib import Path

import grpc.aio
import psutil
import pytest

from services.rpc.record_codec import decode_record
from services.rpc.status import error_of_status
from tests.support.fake_engine import expected_token
from tests.support.worker_calls import eventually, gateway, make_front, make_request

PROMPT = (5, 6, 7)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def test_a_request_runs_to_its_end_and_all_choices_come_back() -> None:
    async with make_front() as front, gateway(front) as end:
        await end.submit(make_request("r1", sampling={"n": 2, "max_tokens": 5}))
        ending = await end.ending("r1", 1)
        assert ending.finish_reason == "length"
        assert ending.timestamps_ms["done"] == 1.0
        for choice in (0, 1):
            assert end.tokens["r1", choice] == [expected_token(PROMPT, i, choice) for i in range(5)]
        assert decode_record(end.hello.record) == front.info


async def test_one_frame_carries_a_step_of_all_requests_of_the_gateway() -> None:
    async with make_front("--step-ms", "30") as front, gateway(front) as end:
        for name in ("a", "b", "c"):
            await end.submit(make_request(name, sampling={"max_tokens": 6}))
        for name in ("a", "b", "c"):
            await end.ending(name)
        assert max(len(step.outputs) for step in end.steps) == 3
        assert len(end.steps) < 18


async def test_each_gateway_hears_of_its_own_requests_only() -> None:
    async with make_front() as front, gateway(front, "one") as one, gateway(front, "two") as two:
        await one.submit(make_request("r1"))
        await two.submit(make_request("r2"))
        await one.ending("r1")
        await two.ending("r2")
        assert {key for key, _ in one.tokens} == {"r1"}
        assert {key for key, _ in two.tokens} == {"r2"}


async def test_cancel_ends_one_request_with_abort() -> None:
    async with make_front("--step-ms", "10") as front, gateway(front) as end:
        await end.submit(make_request("r1", sampling={"max_tokens": 1000}))
        await end.submit(make_request("r2"))
        await end.cancel("r1")
        await end.cancel("nobody")
        assert (await end.ending("r1")).finish_reason == "abort"
        assert (await end.ending("r2")).finish_reason == "length"


@pytest.mark.parametrize("polite", [True, False])
async def test_a_lost_stream_aborts_its_requests(tmp_path: Path, polite: bool) -> None:
    log = tmp_path / "log"
    async with make_front("--step-ms", "10", "--log", str(log)) as front:
        async with gateway(front) as end:
            await end.submit(make_request("r1", sampling={"max_tokens": 1000}))
            await eventually(lambda: end.tokens)
            if polite:
                await end.call.done_writing()
        await eventually(lambda: lines(log) == ["aborted r1"])
        await eventually(lambda: front._state.streams.num_requests == 0)


async def test_an_id_in_use_is_refused_on_another_stream() -> None:
    async with make_front("--step-ms", "10") as front, gateway(front) as one, gateway(front) as two:
        await one.submit(make_request("r1", sampling={"max_tokens": 50}))
        await eventually(lambda: one.tokens)
        await two.submit(make_request("r1", sampling={"n": 2}))
        ending = await two.ending("r1", 1)
        assert (ending.finish_reason, ending.error_kind) == ("error", "InvalidRequest")
        assert "already in use" in ending.error_message
        assert (await one.ending("r1")).finish_reason == "length"


async def test_a_bad_field_and_an_unknown_model_are_named() -> None:
    async with make_front() as front, gateway(front) as end:
        message = make_request("r2", model="other")
        await end.submit(message)
        assert (await end.ending("r2")).error_kind == "ModelNotFound"


async def test_loads_name_the_requests_they_count() -> None:
    async with make_front("--step-ms", "10") as front, gateway(front) as end:
        await end.submit(make_request("r1", sampling={"max_tokens": 20}))
        await eventually(lambda: any("r1" in load.named_request_ids for load in end.loads))
        await end.ending("r1")
        await eventually(lambda: not end.loads[-1].named_request_ids)
        count = len(end.loads)
        await eventually(lambda: len(end.loads) > count)  # a report without any change


async def test_a_protocol_two_versions_away_is_refused_by_name() -> None:
    async with make_front() as front:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with gateway(front, "old-gateway", version=3):
                pass
        error = error_of_status(caught.value, "w")
        assert type(error).__name__ == "ProtocolMismatch"
        assert "old-gateway" in error.message


async def test_while_loading_calls_are_told_so() -> None:
    front = make_front("--load-ms", "500")
    starting = asyncio.create_task(front.start())
    try:
        await eventually(lambda: front.port)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with gateway(front):
                pass
        assert "still loading" in error_of_status(caught.value, "w").message
        await starting
        async with gateway(front) as end:
            await end.submit(make_request("r1"))
            await end.ending("r1")
    finally:
        await front.stop()


async def test_a_dead_engine_ends_every_stream_with_the_reason() -> None:
    async with make_front("--die-on-request", "r1") as front, gateway(front) as end:
        running = asyncio.create_task(front.run())
        await end.submit(make_request("r1", sampling={"max_tokens": 50}))
        with pytest.raises(Exception, match="engine process ended"):
            await running
        await eventually(lambda: end.call.done())
        assert await end.call.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with gateway(front):
                pass
        assert type(error_of_status(caught.value, "w")).__name__ == "EngineDeadError"


async def test_stop_ends_an_engine_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.engine_client.STOP_GRACE_S", 0.2)
    front = make_front("--ignore-shutdown")
    await front.start()
    pid = front.engine_pid
    await front.stop()
    assert pid is not None
    assert not psutil.pid_exists(pid)
