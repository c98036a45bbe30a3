"""What arrives on a socket, received where it belongs, within a time for all of it."""

from __future__ import annotations

import socket
import time

_BUFFER_BYTES = 8192


class Ended(ConnectionResetError):
    """The other side has closed the connection. num_filled: bytes that came of what was waited for."""

    def __init__(self, num_filled: int) -> None:
        super().__init__("the server closed the connection")
        self.num_filled = num_filled


class Inlet:
    """Small things go through a buffer, large ones past it. Raises TimeoutError, Ended and other OSErrors.

    What raises has lost its place: close the connection. acknowledges_at_once: for a server that sends an answer in
    several small pieces and has its kernel hold back each until the one before has arrived, which costs 40 ms a piece.
    """

    def __init__(self, connection: socket.socket, *, acknowledges_at_once: bool = False) -> None:
        self._socket = connection
        self._acknowledges_at_once = acknowledges_at_once
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # of what is received and not taken, in the buffer
        self._deadline_s = 0.0

    def begin(self, timeout_s: float) -> None:
        """All that is taken from now on has so long; and each `sendall`."""
        self._deadline_s = time.monotonic() + timeout_s
        self._socket.settimeout(timeout_s)

    def take(self, num_bytes: int) -> bytes:
        """So many bytes."""
        data = bytearray(num_bytes)
        self.fill(memoryview(data))
        return bytes(data)

    def take_line(self, max_bytes: int) -> bytes | None:
        """A line without its end, CR LF or LF; None where so many bytes hold none."""
        line = bytearray()
        while len(line) <= max_bytes:
            received = bytes(self._buffer[self._start : self._end])
            end = received.find(b"\n")
            if end >= 0:
                self._start += end + 1
                return bytes(line + received[:end]).removesuffix(b"\r")
            line += received
            self._refill(len(line))
        return None

    def fill(self, target: memoryview) -> None:
        """As many bytes as there is room for."""
        num_filled = 0
        while num_filled < len(target):
            rest = target[num_filled:]
            if self._start == self._end and len(rest) >= _BUFFER_BYTES:
                num_filled += self._receive(rest, num_filled)
                continue
            if self._start == self._end:
                self._refill(num_filled)
            num_taken = min(len(rest), self._end - self._start)
            rest[:num_taken] = self._buffer[self._start : self._start + num_taken]
            self._start += num_taken
            num_filled += num_taken

    def _refill(self, num_filled: int) -> None:
        self._start = self._end = 0
        self._end = self._receive(self._buffer, num_filled)

    def _receive(self, target: memoryview, num_filled: int) -> int:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole answer in time")
        self._socket.settimeout(left_s)
        if self._acknowledges_at_once:  # the kernel forgets it again
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        num_received = self._socket.recv_into(target)
        if not num_received:
            raise Ended(num_filled)
        return num_received
