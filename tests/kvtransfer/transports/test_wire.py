"""Frames: packed and parsed again, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import TransferError
from core.ids import SessionId
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.wire import Answer, FrameKind, Hello, RemotePool
from kvtransfer.transports.runs import RunHeader

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
sessions = st.builds(SessionId, st.integers(0, 2**63 - 1))


@given(st.builds(RunHeader, sessions, u32, u16, u16, u32, u16, u16, u32, u64, u32, u64, u32))
def test_a_run_header_survives(header: RunHeader) -> None:
    frame = wire.pack_run(header)
    assert len(frame) == wire.FRAME_BYTES
    assert frame[0] == FrameKind.RUN
    assert wire.parse_run(frame) == header


@given(sessions, u32, st.binary(min_size=32, max_size=32))
def test_an_open_survives(session: SessionId, attempt: int, secret: bytes) -> None:
    frame = wire.pack_open((session, attempt), secret)
    assert len(frame) == wire.FRAME_BYTES
    assert wire.parse_open(frame) == ((session, attempt), secret)


@given(
    st.lists(
        st.builds(Answer, st.sampled_from(FrameKind), st.booleans(), st.tuples(sessions, u32), u64)
    )
)
def test_answers_survive(answers: list[Answer]) -> None:
    packed = b"".join(map(wire.pack_answer, answers))
    assert wire.parse_answers(memoryview(packed)) == answers


@given(u64, u64, u64, u64, st.binary(min_size=16, max_size=16), st.binary(max_size=300))
def test_a_pool_survives(
    address: int, header_bytes: int, block_bytes: int, num_blocks: int, epoch: bytes, words: bytes
) -> None:
    pool = RemotePool(len(words), address, header_bytes, block_bytes, num_blocks, epoch)
    packed = wire.pack_pool(pool, words)
    assert packed[0] == FrameKind.POOL
    assert wire.num_description_bytes(packed[: wire.FRAME_BYTES]) == len(words)
    assert wire.parse_pool(packed[: wire.FRAME_BYTES]) == pool
    assert packed[wire.FRAME_BYTES :] == words


def test_a_long_description_is_refused() -> None:
    frame = bytearray(wire.FRAME_BYTES)
    frame[4:8] = (wire.MAX_DESCRIPTION_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(TransferError, match="describes itself in 32769 bytes"):
        wire.num_description_bytes(frame)


@given(u16, st.text(max_size=200))
def test_a_hello_survives_and_long_names_are_cut(version: int, name: str) -> None:
    frame = wire.pack_hello(Hello(version, name))
    assert len(frame) == wire.FRAME_BYTES
    parsed = wire.parse_hello(frame)
    assert parsed.version == version
    assert len(parsed.name.encode()) <= 3 * 52


def test_another_protocol_is_no_hello() -> None:
    with pytest.raises(TransferError, match="GET / HT"):
        wire.parse_hello(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(wire.FRAME_BYTES))


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (1, 2), (2, 1), (5, 4)])
def test_versions_one_apart_serve_together(ours: int, theirs: int) -> None:
    wire.check_versions(Hello(ours, "D"), Hello(theirs, "P"))


@pytest.mark.parametrize(("ours", "theirs"), [(1, 3), (3, 1), (1, 65535)])
def test_other_versions_are_refused_by_name(ours: int, theirs: int) -> None:
    with pytest.raises(TransferError) as caught:
        wire.check_versions(Hello(ours, "decode-7"), Hello(theirs, "prefill-3"))
    for word in ("decode-7", "prefill-3", str(ours), str(theirs)):
        assert word in caught.value.message


def test_an_unknown_answer_is_refused() -> None:
    with pytest.raises(TransferError, match="unknown kind 9"):
        wire.parse_answers(memoryview(b"\x09".ljust(wire.ANSWER_BYTES, b"\0")))
