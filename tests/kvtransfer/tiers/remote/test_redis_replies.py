"""Replies of a Redis, in whatever pieces they arrive."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

from kvtransfer.tiers.remote.redis_replies import RedisReplies


class Ends:
    """A parser and the server's end of its connection."""

    def __init__(self) -> None:
        mine, self.server = socket.socketpair()
        self.replies = RedisReplies()
        self.mine = mine
        self.replies.on_connect(SimpleNamespace(_sock=mine))

    def close(self) -> None:
        self.mine.close()
        self.server.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_each_kind_of_reply(ends: Ends) -> None:
    ends.server.sendall(b"+OK\r\n:17\r\n$-1\r\n$5\r\na\r\nbc\r\n$0\r\n\r\n:-1\r\n")
    read = [ends.replies.read_response() for _ in range(6)]
    assert read == [b"OK", 17, None, b"a\r\nbc", b"", -1]


def test_an_error_is_a_value_and_one_that_ends_the_service_is_raised(ends: Ends) -> None:
    ends.server.sendall(b"-OOM command not allowed\r\n-LOADING the dataset\r\n-NOAUTH\r\n")
    error = ends.replies.read_response()
    assert isinstance(error, ResponseError)
    assert str(error) == "OOM command not allowed"
    for reason in ("LOADING the dataset", "NOAUTH"):
        with pytest.raises(RedisConnectionError, match=reason):
            ends.replies.read_response()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 5000, 100_000])
def test_a_string_goes_where_it_belongs_in_pieces_of_any_size(ends: Ends, piece: int) -> None:
    value = bytes(i % 253 for i in range(20_000))
    sent = b":1\r\n$%d\r\n%b\r\n+next\r\n" % (len(value), value)
    sent = sent if piece > 100 else sent.replace(value, value[:50]).replace(b"20000", b"50")
    value = value if piece > 100 else value[:50]
    parts = [bytearray(20), bytearray(len(value) - 20)]
    ends.replies.begin(20.0, [memoryview(part) for part in parts])
    got: list[object] = []
    chunks = [sent[at : at + piece] for at in range(0, len(sent), piece)]
    ends.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    for chunk in chunks:
        ends.server.sendall(chunk)
    got = [ends.replies.read_response() for _ in range(3)]
    assert got == [1, len(value), b"next"]
    assert b"".join(parts) == value


def test_a_string_of_another_size_is_left_unread(ends: Ends) -> None:
    part = bytearray(4)
    ends.replies.begin(20.0, [memoryview(part)])
    ends.server.sendall(b"$5\r\nvalue\r\n")
    assert ends.replies.read_response() == 5
    assert part == bytes(4)


@pytest.mark.parametrize(
    "sent", [b"*1\r\n:1\r\n", b"%1\r\n", b"hello\r\n", b"\r\n", b"+" + b"x" * 9000]
)
def test_what_is_no_reply_is_refused(ends: Ends, sent: bytes) -> None:
    ends.server.sendall(sent)
    with pytest.raises(InvalidResponse):
        ends.replies.read_response()


def test_a_string_that_is_longer_than_it_says_is_refused(ends: Ends) -> None:
    ends.replies.begin(20.0, [memoryview(bytearray(3))])
    ends.server.sendall(b"$3\r\nvalue\r\n")
    with pytest.raises(InvalidResponse, match="longer than it says"):
        ends.replies.read_response()


@pytest.mark.parametrize("sent", [b"", b"$10\r", b"$10\r\nval"])
def test_a_connection_that_ends_in_a_reply_is_an_error(ends: Ends, sent: bytes) -> None:
    ends.replies.begin(20.0, [memoryview(bytearray(10))])
    ends.server.sendall(sent)
    ends.server.close()
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        ends.replies.read_response()


def test_time_is_for_the_whole_answer(ends: Ends) -> None:
    ends.replies.begin(0.0, [memoryview(bytearray(10))])
    ends.server.sendall(b"$10\r\nval")
    with pytest.raises(TimeoutError):
        ends.replies.read_response()
