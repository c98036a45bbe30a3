"""D's end of one shm connection: announcements come in, D copies what they name out of P's pool.

A copy counts when P's block is still in the life that was announced after the copy: P raises a block's generation
before it uses it anew. Where it is not, P has ended the session, and the run is answered as refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from core.errors import TransferError
from core.ids import BlockId
from kernels.host_memory import HostMemory, copy_runs
from kvtransfer.pool_memory import PeerPool
from kvtransfer.transports.base import COPY_SLICE_BYTES, MAX_SLICE_BYTES
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.announced import AnnouncedInbound, batch_of
from kvtransfer.transports.links.wire import Announcement, Entries, Entry, Hello
from kvtransfer.transports.runs import UNCHECKED, RunAnswer, RunBatch, RunHeader


class ShmInbound(AnnouncedInbound):
    """See InboundLink."""

    def __init__(
        self,
        sock: socket.socket,
        intake: Intake,
        hello: Hello,
        deadline_s: float,
    ) -> None:
        super().__init__(sock, intake, hello, deadline_s)
        self._pool: PeerPool | None = None
        self._theirs: HostMemory | None = None

    def close(self) -> None:
        """See InboundLink.close."""
        if self._pool is not None:
            self._theirs = None
            self._pool.close()
            self._pool = None
        super().close()

    @property
    def _blocks_of_peer(self) -> PeerPool | None:
        return self._pool

    def _receive(self) -> int:
        if self._said_hello:
            return super()._receive()
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
        self._theirs = HostMemory(self._pool.buffer)

    def _take_hello(self, frame: bytes | bytearray) -> None:
        super()._take_hello(frame)
        if self._pool is None:
            raise TransferError("peer sent no pool with its first bytes")

    def _take_announcement(self, head: Announcement, columns: Entries) -> None:
        pool = self._pool
        assert pool is not None
        batch = batch_of(head, columns)
        blocks = None
        if head.num_bytes * head.num_blocks <= COPY_SLICE_BYTES:
            blocks = self._intake.enter_batch(batch, self, is_opened=head.key in self._opened)
        if blocks is None:
            self._take_each(pool, head, columns)
        else:
            self._take_together(pool, head, batch, blocks, columns)

    def _take_together(
        self,
        pool: PeerPool,
        head: Announcement,
        batch: RunBatch,
        blocks: list[BlockId],
        columns: Entries,
    ) -> None:
        """All runs at once, into blocks that have been entered."""
        intact = [False] * len(blocks)
        try:
            checksums = self._copy(pool, head, blocks, columns.blocks)
            intact = self._unchanged(pool, columns.blocks, columns.generations)
            if head.is_checked:
                self._intake.check_batch(batch, checksums, columns.checksums, intact)
        finally:
            self._intake.count(received_bytes_total=head.num_bytes * len(blocks))
            is_all = self._intake.leave_batch(batch, blocks, intact)
        self._answer_run(head.key, RunAnswer(head.number, is_all))

    def _copy(
        self, pool: PeerPool, head: Announcement, blocks: Sequence[int], sources: Sequence[int]
    ) -> list[int]:
        """Copy each source block's run to its place in a block of ours; their checksums, where they are wanted."""
        assert self._theirs is not None
        own, theirs, offset = self._intake.block_bytes, pool.block_bytes, head.offset_bytes
        place = self._intake.offset_bytes(head.group, head.first_layer, head.num_layers)
        to_places = [block * own + place for block in blocks]
        from_places = [block * theirs + offset for block in sources]
        return copy_runs(
            self._intake.memory, to_places, self._theirs, from_places, head.num_bytes,
            is_checked=head.is_checked,
        )  # fmt: skip

    def _unchanged(
        self, pool: PeerPool, blocks: Sequence[int], generations: Sequence[int]
    ) -> list[bool]:
        """Which blocks are still in the life that was announced: looked at after their bytes were taken."""
        now = [*map(pool.generations.__getitem__, blocks)]
        if pool.is_gone:
            return [False] * len(now)
        if now == list(generations):
            return [True] * len(now)
        return [own == meant for own, meant in zip(now, generations, strict=True)]

    def _take_each(self, pool: PeerPool, head: Announcement, columns: Entries) -> None:
        answers = [
            self._take_run(pool, head, Entry(*entry)) for entry in zip(*columns, strict=True)
        ]
        if None not in answers:
            self._answer_run(head.key, RunAnswer(head.number, all(answers)))

    def _take_run(self, pool: PeerPool, head: Announcement, entry: Entry) -> bool | None:
        """Whether one block's run is in the pool; None when another connection answers for it."""
        assert self._theirs is not None
        checksum = entry.checksum if head.is_checked else UNCHECKED
        header = RunHeader(
            head.session, head.attempt, head.rank, head.group, entry.position, head.first_layer,
            head.num_layers, entry.valid_slots, head.num_bytes, checksum, head.number,
        )  # fmt: skip
        run = self._intake.begin(header, is_opened=head.key in self._opened)
        source = entry.block * pool.block_bytes + head.offset_bytes
        while run.num_bytes_left:
            place = run.next_slice(MAX_SLICE_BYTES if head.is_checked else COPY_SLICE_BYTES)
            if run.is_inside:
                start = source + header.num_bytes - run.num_bytes_left
                to = [run.slice_offset_bytes]
                copy_runs(self._intake.memory, to, self._theirs, [start], len(place))
                if not all(self._unchanged(pool, [entry.block], [entry.generation])):
                    run.wrote(0)
                    self._intake.abandon(run)
                    self._intake.count(late_runs_total=1)
                    return False
            else:  # covered already, but a part of what the checksum is of
                start = source + header.num_bytes - run.num_bytes_left
                place[:] = pool.buffer[start : start + len(place)]
            run.wrote(len(place))
        return run.answer.is_admitted if run.answer else None
