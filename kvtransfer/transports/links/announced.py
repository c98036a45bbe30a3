"""D's end of a connection that carries announcements only: the bytes lie in P's pool, from where D takes them."""

from __future__ import annotations

import socket
from abc import abstractmethod
from typing import Protocol

from core.errors import TransferError
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.inbound import InboundLink
from kvtransfer.transports.links.wire import Announcement, Entries, FrameKind, Hello
from kvtransfer.transports.runs import RunBatch

MAX_ANNOUNCEMENT_BYTES = wire.FRAME_BYTES + wire.MAX_ENTRIES * wire.ENTRY_BYTES
"""Of one announcement, its entries included."""


class BlocksOfPeer(Protocol):
    """How large the pool is that announcements speak of."""

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        ...

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        ...


class AnnouncedInbound(InboundLink):
    """See InboundLink. Takes frames apart; whoever extends it knows the peer's pool and takes what is announced."""

    def __init__(
        self,
        sock: socket.socket,
        intake: Intake,
        hello: Hello,
        deadline_s: float,
        *,
        buffer_bytes: int = MAX_ANNOUNCEMENT_BYTES,
    ) -> None:
        """buffer_bytes: the longest frame; what is read at once is dealt with before the next connection's turn."""
        super().__init__(sock, intake, hello, deadline_s)
        self._buffer = bytearray(buffer_bytes)
        self._view = memoryview(self._buffer)
        self._filled_bytes = 0

    @property
    @abstractmethod
    def _blocks_of_peer(self) -> BlocksOfPeer | None:
        """The pool that the peer has shown, if it has."""

    @abstractmethod
    def _take_announcement(self, head: Announcement, columns: Entries) -> None:
        """Take what is announced; head and entries fit the peer's pool."""

    def read(self) -> None:
        """See InboundLink.read."""
        try:
            num_bytes = self._receive()
        except BlockingIOError:
            return
        if num_bytes == 0:
            raise ConnectionResetError("peer closed the connection")
        self._filled_bytes += num_bytes
        self._take_frames()

    def _receive(self) -> int:
        """Read once into the rest of the buffer; how many bytes came."""
        return self.sock.recv_into(self._view[self._filled_bytes :])

    def _take_frames(self) -> None:
        start = 0
        while (end := self._end_of_frame(start)) <= self._filled_bytes:
            frame = self._view[start:end]
            if len(frame) > wire.FRAME_BYTES:
                self._take_long_frame(frame[: wire.FRAME_BYTES], frame[wire.FRAME_BYTES :])
            else:
                self._take_frame(bytes(frame))
            start = end
        self._view[: self._filled_bytes - start] = bytes(self._view[start : self._filled_bytes])
        self._filled_bytes -= start

    def _end_of_frame(self, start: int) -> int:
        """Where the frame that begins there ends, with what follows it."""
        end = start + wire.FRAME_BYTES
        if end > self._filled_bytes or not self._said_hello:
            return end
        return end + self._num_following(self._view[start:end])

    def _num_following(self, frame: memoryview) -> int:
        """How many bytes belong to a frame beyond itself."""
        if frame[0] != FrameKind.RUNS:
            return 0
        return wire.ENTRY_BYTES * wire.num_entries(frame)

    def _take_frame(self, frame: bytes) -> None:
        if not self._said_hello:
            self._take_hello(frame)
        elif frame[0] == FrameKind.OPEN:
            self._take_open(*wire.parse_open(frame))
        else:
            raise TransferError(f"frame of kind {frame[0]} where none may be")

    def _take_long_frame(self, frame: memoryview, rest: memoryview) -> None:
        head, pool = wire.parse_runs(frame), self._blocks_of_peer
        if not self.is_trusted or pool is None:
            raise TransferError("runs announced where none may be")
        end_bytes = head.offset_bytes + head.num_bytes
        if end_bytes > pool.block_bytes:
            raise TransferError(
                f"peer announces bytes up to {end_bytes} of blocks of {pool.block_bytes}"
            )
        if head.num_bytes > self._intake.block_bytes:
            raise TransferError(
                f"peer announces runs of {head.num_bytes} bytes for blocks of {self._intake.block_bytes}"
            )
        if self._intake.has_plan(head.key):
            raise TransferError(
                "peer announces blocks of a session whose sides keep KV differently"
            )
        columns = wire.parse_entries(rest)
        if max(columns.blocks) >= pool.num_blocks:
            raise TransferError(f"peer announces block {max(columns.blocks)} of {pool.num_blocks}")
        self._take_announcement(head, columns)


def batch_of(head: Announcement, columns: Entries) -> RunBatch:
    """What is announced, as one batch."""
    return RunBatch(
        head.key, head.rank, head.group, head.first_layer, head.num_layers, head.num_bytes,
        columns.positions, columns.valid_slots,
    )  # fmt: skip
