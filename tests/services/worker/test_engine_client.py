"""Frames from the engine's pipe, however its bytes are cut."""

import pytest

from engine.messages import EngineProgress
from services.worker.engine_client import FrameReader, encode_frame

FRAMES = [encode_frame(EngineProgress("word " * length)) for length in (0, 1, 90)]


@pytest.mark.parametrize("piece_bytes", [1, 3, 4, 5, 64, len(FRAMES[0]), 1 << 20])
def test_frames_arrive_whole_and_in_order(piece_bytes: int) -> None:
    bodies: list[bytes] = []
    reader = FrameReader(bodies.append, lambda: None)
    stream = b"".join(FRAMES)
    for start in range(0, len(stream), piece_bytes):
        reader.data_received(stream[start : start + piece_bytes])
    assert bodies == [frame[4:] for frame in FRAMES]


def test_a_frame_alone_is_delivered_at_once_also_after_one_that_came_in_pieces() -> None:
    bodies: list[bytes] = []
    reader = FrameReader(bodies.append, lambda: None)
    reader.data_received(FRAMES[0])
    reader.data_received(FRAMES[1][:7])
    assert len(bodies) == 1
    reader.data_received(FRAMES[1][7:])
    reader.data_received(FRAMES[2])
    assert bodies == [frame[4:] for frame in FRAMES]
