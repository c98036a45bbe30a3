"""A parser for redis-py that puts the bytes of a value where they belong.

redis-py's own gathers a reply in a buffer, takes it out as an object, and leaves the rest to the caller: three copies
of each block. This one reads RESP 2, of which a store of blocks meets four kinds of reply; a string of bytes goes
into memory that `begin` has named, received there.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

from kvtransfer.tiers.remote.store import ANSWER_TIMEOUT_S, num_bytes

_READ_BYTES = 8192
_LONGEST_LINE_BYTES = 4096
_NOT_NOW = (b"LOADING", b"MASTERDOWN", b"CLUSTERDOWN", b"NOAUTH", b"WRONGPASS")
"""Errors after which the server is of no use to anybody: it is as good as away."""

_CLOSED = "the server closed the connection"

Reply = bytes | int | None | ResponseError


class RedisReplies:
    """What a connection calls for each reply: a line or a string as bytes, a number, None, or an error as a value.

    A string that comes while memory is named for it is only its length: where that is the memory's, it is there, and
    where not, none of it is read.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._start = self._end = 0  # of what is received and not read, in the buffer
        self._deadline_s = 0.0
        self._parts: Sequence[memoryview] = ()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._socket is not None

    def begin(self, timeout_s: float, parts: Sequence[memoryview] = ()) -> None:
        """All that is sent or received from now on has so long. parts: where a string goes."""
        self._deadline_s = time.monotonic() + timeout_s
        self._parts = parts
        if self._socket is not None:
            self._socket.settimeout(timeout_s)

    # ---- what redis-py calls

    def on_connect(self, connection: Any) -> None:
        """The connection has a new socket."""
        self._socket = connection._sock
        self._start = self._end = 0
        self.begin(ANSWER_TIMEOUT_S)

    def on_disconnect(self) -> None:
        """It has none any more."""
        self._socket = None

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Reply:
        """The next reply."""
        kind, text = self._read_line()
        if kind == b"+":
            return text
        if kind == b":":
            return int(text)
        if kind == b"-":
            return _error(text)
        if kind != b"$":
            raise InvalidResponse(f"a reply that begins with {kind!r}")
        return self._read_string(int(text))

    # ---- inside

    def _read_string(self, length: int) -> Reply:
        if length < 0:
            return None
        if not self._parts:
            data = bytearray(length)
            self._fill(memoryview(data))
            self._end_string()
            return bytes(data)
        if length == num_bytes(self._parts):
            for part in self._parts:
                self._fill(part)
            self._end_string()
        return length

    def _end_string(self) -> None:
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != b"\r\n":
            raise InvalidResponse("a string is longer than it says")

    def _read_line(self) -> tuple[bytes, bytes]:
        """A reply's kind and the rest of its first line."""
        line = bytearray()
        while True:
            received = bytes(self._buffer[self._start : self._end])
            end = received.find(b"\n")
            if end >= 0:
                self._start += end + 1
                line += received[:end]
                return bytes(line[:1]), bytes(line[1:]).removesuffix(b"\r")
            line += received
            if len(line) > _LONGEST_LINE_BYTES:
                raise InvalidResponse("a line that does not end")
            self._end = self._receive(self._buffer)
            self._start = 0

    def _fill(self, target: memoryview) -> None:
        taken = min(len(target), self._end - self._start)
        target[:taken] = self._buffer[self._start : self._start + taken]
        self._start += taken
        while taken < len(target):
            taken += self._receive(target[taken:])

    def _receive(self, target: memoryview) -> int:
        assert self._socket is not None, "read before connect"
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole answer in time")
        self._socket.settimeout(left_s)
        num_received = self._socket.recv_into(target)
        if not num_received:
            raise RedisConnectionError(_CLOSED)
        return num_received


def _error(text: bytes) -> ResponseError:
    message = text.decode(errors="replace")
    if text.startswith(_NOT_NOW):
        raise RedisConnectionError(message)
    return ResponseError(message)
