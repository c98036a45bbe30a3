"""A parser for redis-py that puts the bytes of a value where they belong.

redis-py's own gathers a reply in a buffer, takes it out as an object, and leaves the rest to the caller: three copies
of each block. This one reads RESP 2, of which a store of blocks meets four kinds of reply; a string of bytes goes
into memory that `begin` has named, received there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

from kvtransfer.tiers.remote.inlet import Inlet
from kvtransfer.tiers.remote.store import ANSWER_TIMEOUT_S, num_bytes

_LONGEST_LINE_BYTES = 4096
_NOT_NOW = (b"LOADING", b"MASTERDOWN", b"CLUSTERDOWN", b"NOAUTH", b"WRONGPASS")
"""Errors after which the server is of no use to anybody: it is as good as away."""

Reply = bytes | int | None | ResponseError


class RedisReplies:
    """What a connection calls for each reply: a line or a string as bytes, a number, None, or an error as a value.

    A string that comes while memory is named for it is only its length: where that is the memory's, it is there, and
    where not, none of it is read.
    """

    def __init__(self) -> None:
        self._inlet: Inlet | None = None
        self._parts: Sequence[memoryview] = ()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._inlet is not None

    def begin(self, timeout_s: float, parts: Sequence[memoryview] = ()) -> None:
        """All that is sent or received from now on has so long. parts: where a string goes."""
        self._parts = parts
        if self._inlet is not None:
            self._inlet.begin(timeout_s)

    # ---- what redis-py calls

    def on_connect(self, connection: Any) -> None:
        """The connection has a new socket."""
        self._inlet = Inlet(connection._sock)
        self.begin(ANSWER_TIMEOUT_S)

    def on_disconnect(self) -> None:
        """It has none any more."""
        self._inlet = None

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Reply:
        """The next reply."""
        assert self._inlet is not None, "read before connect"
        line = self._inlet.take_line(_LONGEST_LINE_BYTES)
        if line is None:
            raise InvalidResponse("a line that does not end")
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b":":
            return int(text)
        if kind == b"-":
            return _error(text)
        if kind != b"$":
            raise InvalidResponse(f"a reply that begins with {kind!r}")
        return self._read_string(self._inlet, int(text))

    def _read_string(self, inlet: Inlet, length: int) -> Reply:
        if length < 0:
            return None
        reply: bytes | int = length
        if not self._parts:
            reply = inlet.take(length)
        elif length == num_bytes(self._parts):
            for part in self._parts:
                inlet.fill(part)
        else:
            return length
        if inlet.take(2) != b"\r\n":
            raise InvalidResponse("a string is longer than it says")
        return reply


def _error(text: bytes) -> ResponseError:
    message = text.decode(errors="replace")
    if text.startswith(_NOT_NOW):
        raise RedisConnectionError(message)
    return ResponseError(message)
