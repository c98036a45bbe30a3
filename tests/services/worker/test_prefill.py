"""Prefill: two workers with scripted engines, and what D hears when P refuses, is silent or dies."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from core.worker_info import Role
from services.rpc.channel import open_channel
from services.rpc.codec import encode_request
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.record_codec import encode_identity, encode_layout
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1 import baton_pb2_grpc as pb_grpc
from services.worker.front import WorkerFront
from services.worker.prefill_sessions import GIVEN_UP
from tests.support.fake_engine import IDENTITY, LAYOUT, expected_token
from tests.support.worker_calls import eventually, gateway, make_front, make_request

PROMPT = (5, 6, 7)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def assert_served(decode: WorkerFront, *candidates: str, name: str = "r1") -> None:
    """The request ends with the tokens that any way of running it gives."""
    async with gateway(decode) as end:
        await end.submit(make_request(name, sampling={"max_tokens": 6, "n": 2}), candidates)
        for choice in (0, 1):
            assert (await end.ending(name, choice)).finish_reason == "length"
            assert end.tokens[name, choice] == [expected_token(PROMPT, i, choice) for i in range(6)]


async def assert_idle(*fronts: WorkerFront) -> None:
    for front in fronts:
        await eventually(lambda front=front: front._state.sessions.num_open == 0)
        await eventually(lambda front=front: front._calls.num_open == 0)


async def test_a_session_goes_from_announcement_to_completion(tmp_path: Path) -> None:
    log = tmp_path / "prefill"
    async with (
        make_front("--log", str(log), role=Role.PREFILL) as prefill,
        make_front(role=Role.DECODE) as decode,
    ):
        await assert_served(decode, prefill.control_address)
        await eventually(lambda: lines(log) == ["ended complete"])
        await assert_idle(prefill, decode)


async def test_not_now_and_room_are_relayed() -> None:
    async with (
        make_front(role=Role.PREFILL) as prefill,
        make_front("--decline-first", role=Role.DECODE) as decode,
    ):
        await assert_served(decode, prefill.control_address)


@pytest.mark.parametrize("option", ["--refuse-prefill", "--die-on-grant"])
async def test_the_next_candidate_is_asked_after_a_refusal_or_a_death(
    option: str, tmp_path: Path
) -> None:
    log = tmp_path / "decode"
    async with (
        make_front(option, role=Role.PREFILL) as first,
        make_front(role=Role.MIXED) as second,
        make_front("--log", str(log), role=Role.DECODE) as decode,
    ):
        running = asyncio.create_task(first.run())
        await assert_served(decode, first.control_address, second.control_address)
        reason = {"--refuse-prefill": "NoCapacity", "--die-on-grant": "EngineDeadError"}[option]
        assert lines(log) == [f"lost {reason}"]
        await assert_idle(first, second, decode)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_nobody_there_is_noticed_at_once(tmp_path: Path) -> None:
    log = tmp_path / "decode"
    async with make_front("--log", str(log), role=Role.DECODE) as decode:
        async with asyncio.timeout(3):
            await assert_served(decode, "127.0.0.1:1")
        assert lines(log) == ["lost WorkerLostError"]


async def test_a_worker_without_that_role_refuses() -> None:
    async with make_front(role=Role.DECODE) as other, make_front(role=Role.DECODE) as decode:
        await assert_served(decode, other.control_address)


async def test_a_cancelled_request_ends_the_session_on_both_sides(tmp_path: Path) -> None:
    log = tmp_path / "prefill"
    async with (
        make_front("--silent-prefill", "--log", str(log), role=Role.PREFILL) as prefill,
        make_front(role=Role.DECODE) as decode,
        gateway(decode) as end,
    ):
        await end.submit(make_request("r1"), (prefill.control_address,))
        await eventually(lambda: prefill._state.sessions.num_open == 1)
        await end.cancel("r1")
        assert (await end.ending("r1")).finish_reason == "abort"
        await eventually(lambda: lines(log) == [f"ended {GIVEN_UP}"])
        await assert_idle(prefill, decode)


async def test_the_lease_is_renewed_while_the_session_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []
    import services.worker.prefill_sessions as module

    relay = module._message_of

    def record(key: tuple[int, int], frame: pb.DecodeFrame) -> object:
        seen.append(frame.WhichOneof("frame"))
        return relay(key, frame)

    monkeypatch.setattr(module, "_message_of", record)
    async with (
        make_front("--silent-prefill", role=Role.PREFILL) as prefill,
        make_front("--lease-ms", "90", role=Role.DECODE) as decode,
        gateway(decode) as end,
    ):
        await end.submit(make_request("r1"), (prefill.control_address,))
        await eventually(lambda: seen.count("renew") >= 3)


@pytest.mark.failure_edge("prefill worker stopped")
async def test_a_stopped_peer_is_given_up_in_seconds(tmp_path: Path) -> None:
    log = tmp_path / "decode"
    # A process that accepts connections and answers nothing: its kernel keeps the port open.
    server = await asyncio.create_subprocess_exec(
        "python3", "-c",
        "import socket,time; s=socket.create_server(('127.0.0.1',0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(60)",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    port = int(await server.stdout.readline())
    os.kill(server.pid, signal.SIGSTOP)
    try:
        async with make_front("--log", str(log), role=Role.DECODE) as decode:
            async with asyncio.timeout(9):
                await assert_served(decode, f"127.0.0.1:{port}")
            assert lines(log) == ["lost WorkerLostError"]
    finally:
        server.kill()
        await server.wait()


async def test_a_bad_first_frame_is_answered_with_the_reason() -> None:
    async with make_front() as front, open_channel(front.control_address) as channel:
        stub = pb_grpc.WorkerStub(channel)
        call = stub.Prefill()
        await call.write(pb.DecodeFrame(room=pb.PrefillRoom()))
        assert "first frame" in (await call.read()).refused.message

        request = pb.PrefillRequest(protocol_version=9, decode_worker_id="d-9")
        call = stub.Prefill()
        await call.write(pb.DecodeFrame(request=request))
        refused = (await call.read()).refused
        assert refused.error_kind == "ProtocolMismatch"
        assert "d-9" in refused.message


async def test_one_session_attempt_has_one_stream() -> None:
    async with (
        make_front("--silent-prefill") as front,
        open_channel(front.control_address) as channel,
    ):
        request = pb.PrefillRequest(
            protocol_version=PROTOCOL_VERSION,
            session_id=7,
            attempt=1,
            request=encode_request(make_request("r1")),
            identity=encode_identity(IDENTITY),
            layout=encode_layout(LAYOUT),
            lease_remaining_ms=1000,
        )
        stub = pb_grpc.WorkerStub(channel)
        first, second = stub.Prefill(), stub.Prefill()
        await first.write(pb.DecodeFrame(request=request))
        assert (await first.read()).WhichOneof("frame") == "accepted"
        await second.write(pb.DecodeFrame(request=request))
        assert "already open" in (await second.read()).refused.message
        first.cancel()
        await eventually(lambda: front._state.sessions.num_open == 0)
