"""D's end of one shm connection: announcements come in, D copies what they name out of P's pool.

A copy counts when P's block is still in the life that was announced after the copy: P raises a block's generation
before it uses it anew. Where it is not, P has ended the session, and the run is answered as refused.
"""

from __future__ import annotations

import os
import socket

from core.errors import TransferError
from kvtransfer.counters import TransferCounters
from kvtransfer.pool_memory import PeerPool
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.inbound import InboundLink
from kvtransfer.transports.links.wire import Announcement, Entry, FrameKind, Hello
from kvtransfer.transports.runs import UNCHECKED, RunAnswer, RunHeader

_BUFFER_BYTES = wire.FRAME_BYTES + wire.MAX_ENTRIES * wire.ENTRY_BYTES
"""The longest frame; what is read at once is dealt with before the next connection's turn."""


class ShmInbound(InboundLink):
    """See InboundLink."""

    def __init__(
        self,
        sock: socket.socket,
        intake: Intake,
        hello: Hello,
        counters: TransferCounters,
        deadline_s: float,
    ) -> None:
        super().__init__(sock, intake, hello, counters, deadline_s)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._filled_bytes = 0
        self._pool: PeerPool | None = None

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

    def close(self) -> None:
        """See InboundLink.close."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        super().close()

    def _receive(self) -> int:
        if self._said_hello:
            return self.sock.recv_into(self._view[self._filled_bytes :])
        wanted = wire.FRAME_BYTES - self._filled_bytes
        data, descriptors, _, _ = socket.recv_fds(self.sock, wanted, 1)
        self._view[self._filled_bytes : self._filled_bytes + len(data)] = data
        for descriptor in descriptors:
            self._take_descriptor(descriptor)
        return len(data)

    def _take_descriptor(self, descriptor: int) -> None:
        if self._pool is not None:
            os.close(descriptor)
            raise TransferError("peer sent two pools")
        self._pool = PeerPool(descriptor)

    def _take_frames(self) -> None:
        start = 0
        while self._filled_bytes - start >= wire.FRAME_BYTES:
            size = self._frame_bytes(start)
            if self._filled_bytes - start < size:
                break
            self._take_frame(self._view[start : start + size])
            start += size
        self._view[: self._filled_bytes - start] = bytes(self._view[start : self._filled_bytes])
        self._filled_bytes -= start

    def _frame_bytes(self, start: int) -> int:
        """Bytes of the frame that begins there, its entries included."""
        if not self._said_hello or self._buffer[start] != FrameKind.RUNS:
            return wire.FRAME_BYTES
        head = wire.parse_runs(self._view[start : start + wire.FRAME_BYTES])
        return wire.FRAME_BYTES + head.num_blocks * wire.ENTRY_BYTES

    def _take_frame(self, frame: memoryview) -> None:
        if not self._said_hello:
            self._take_hello(bytes(frame))
            if self._pool is None:
                raise TransferError("peer sent no pool with its first bytes")
        elif frame[0] == FrameKind.OPEN:
            self._take_open(*wire.parse_open(bytes(frame)))
        elif frame[0] == FrameKind.RUNS and self.is_trusted:
            head = wire.parse_runs(frame[: wire.FRAME_BYTES])
            self._take_runs(head, wire.parse_entries(frame[wire.FRAME_BYTES :]))
        else:
            raise TransferError(f"frame of kind {frame[0]} where none may be")

    def _take_runs(self, head: Announcement, entries: list[Entry]) -> None:
        pool = self._pool
        assert pool is not None
        if head.offset_bytes + head.num_bytes > pool.block_bytes:
            raise TransferError(
                f"peer announces bytes up to {head.offset_bytes + head.num_bytes} of blocks of {pool.block_bytes}"
            )
        answers = [self._take_run(pool, head, entry) for entry in entries]
        if None not in answers:
            self._answer_run(head.key, RunAnswer(head.number, all(answers)))

    def _take_run(self, pool: PeerPool, head: Announcement, entry: Entry) -> bool | None:
        """Whether one block's run is in the pool; None when another connection answers for it."""
        if entry.block >= pool.num_blocks:
            raise TransferError(f"peer announces block {entry.block} of {pool.num_blocks}")
        checksum = entry.checksum if head.is_checked else UNCHECKED
        header = RunHeader(
            head.session, head.attempt, head.rank, head.group, entry.position, head.first_layer,
            head.num_layers, entry.valid_slots, head.num_bytes, checksum, head.number,
        )  # fmt: skip
        run = self._intake.begin(header, is_opened=head.key in self._opened)
        source = entry.block * pool.block_bytes + head.offset_bytes
        while run.num_bytes_left:
            place = run.next_slice()
            if run.is_inside:
                start = source + header.num_bytes - run.num_bytes_left
                place[:] = pool.buffer[start : start + len(place)]
                if pool.generations[entry.block] != entry.generation or pool.is_gone:
                    run.wrote(0)
                    self._intake.abandon(run)
                    self._counters.late_runs_total += 1
                    return False
            run.wrote(len(place))
        return run.answer.is_admitted if run.answer else None
