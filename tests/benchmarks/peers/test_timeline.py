"""Rates from timelines, and timelines from streams that arrive in any pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.client import read_timeline
from benchmarks.peers.timeline import Timeline, decode_rate, joint_decode_rate, whole_rate


def even(first_s: float, step_s: float, num_tokens: int) -> Timeline:
    times = tuple(first_s + step_s * i for i in range(num_tokens))
    return Timeline(times, tuple(range(1, num_tokens + 1)))


def test_decode_rate_leaves_the_first_token_out() -> None:
    assert decode_rate(even(5.0, 0.1, 11)) == pytest.approx(10.0)


def test_decode_rate_when_the_first_event_tells_three_tokens() -> None:
    assert decode_rate(Timeline((1.0, 2.0), (3, 13))) == pytest.approx(10.0)


def test_whole_rate_runs_to_the_last_token_of_all() -> None:
    assert whole_rate([even(1.0, 0.1, 11), even(1.0, 0.2, 11)]) == pytest.approx(22 / 3.0)


def test_joint_rate_counts_only_what_came_after_the_last_first_token() -> None:
    early, late = even(0.0, 1.0, 11), even(5.0, 1.0, 6)
    assert joint_decode_rate([early, late]) == pytest.approx(10 / 5.0)


def test_joint_rate_is_nothing_when_one_stream_begins_as_the_others_end() -> None:
    assert joint_decode_rate([even(0.0, 1.0, 3), even(9.0, 1.0, 1)]) == 0.0


def test_an_answer_without_tokens_is_no_timeline() -> None:
    with pytest.raises(ValueError, match="no answer"):
        Timeline((), ())


@given(st.lists(st.integers(1, 40), max_size=12))
def test_events_are_read_alike_however_they_are_cut(cuts: list[int]) -> None:
    body = b"".join(b"data: " + json.dumps({"ids": [i]}).encode() + b"\n\n" for i in range(5))
    body += b"data: [DONE]\n\n"
    chunks: list[tuple[float, bytes]] = []
    for cut in cuts:
        chunks.append((float(len(chunks)), body[:cut]))
        body = body[cut:]
    chunks.append((float(len(chunks)), body))
    line = read_timeline(chunks, lambda event: (0, event["ids"]))
    assert line.token_ids == (0, 1, 2, 3, 4)
    assert line.counts == (1, 2, 3, 4, 5)
    assert list(line.times_s) == sorted(line.times_s)


def test_an_event_that_tells_no_new_token_is_no_point() -> None:
    chunks = [(0.5, b'data: {"told": 2}\n\n'), (1.0, b'data: {"told": 2}\n\n')]
    assert read_timeline(chunks, lambda event: (event["told"], ())) == Timeline((0.5,), (2,))
