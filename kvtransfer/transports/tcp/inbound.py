"""D's end of one tcp connection: frames, runs followed by their payload, which goes straight into the pool."""

from __future__ import annotations

import socket
from collections import deque

from core.errors import TransferError
from kvtransfer.transports.base import MAX_SLICE_BYTES
from kvtransfer.transports.incoming_run import IncomingRun
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.inbound import READ_BUDGET_BYTES, InboundLink
from kvtransfer.transports.links.wire import Announcement, Entries, FrameKind, Hello
from kvtransfer.transports.runs import RunAnswer, RunBatch, RunHeader
from kvtransfer.transports.tcp.incoming_batch import IncomingBatch

_WAKE_BYTES = MAX_SLICE_BYTES
"""Of a run that is longer, how much the socket gathers before this end is woken: as much as it takes at a time."""


class TcpInbound(InboundLink):
    """See InboundLink."""

    def __init__(
        self,
        sock: socket.socket,
        intake: Intake,
        hello: Hello,
        deadline_s: float,
    ) -> None:
        super().__init__(sock, intake, hello, deadline_s)
        self._frame = bytearray(wire.FRAME_BYTES)
        self._frame_view = memoryview(self._frame)
        self._frame_filled_bytes = 0
        self._run: IncomingRun | None = None
        self._batch: IncomingBatch | None = None
        self._entries = bytearray()  # of an announcement, as far as they have come
        self._head: Announcement | None = None
        self._runs: deque[RunHeader] = (
            deque()
        )  # of a batch that is taken run by run: those still to come
        self._answers: list[bool | None] = []  # to those that have come
        self._wake_bytes = 1

    def read(self) -> None:
        """See InboundLink.read."""
        budget_bytes = READ_BUDGET_BYTES
        while budget_bytes > 0:
            try:
                num_bytes, is_dry = self._read_some()
            except BlockingIOError:
                break
            if num_bytes == 0:
                raise ConnectionResetError("peer closed the connection")
            if is_dry:
                break
            budget_bytes -= num_bytes
        self._ask_for_more()

    def close(self) -> None:
        """See InboundLink.close."""
        if self._run is not None:
            self._intake.abandon(self._run)
        if self._batch is not None:
            self._batch.abandon()
        self._run = self._batch = None
        super().close()

    def _ask_for_more(self) -> None:
        """Let the socket speak up when a good part of the run that is under way has come, or its rest.

        The kernel lowers a mark that its buffers cannot hold, and speaks up below it when they are full or the peer has
        closed.
        """
        under_way = self._batch or self._run
        wanted = max(1, min(under_way.num_bytes_left, _WAKE_BYTES)) if under_way else 1
        if wanted != self._wake_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._wake_bytes = wanted

    def _read_some(self) -> tuple[int, bool]:
        """Bytes read, and whether the socket gave less than was asked."""
        if self._run is not None:
            return self._read_run(self._run)
        if self._batch is not None:
            return self._read_batch(self._batch)
        return self._read_entries(self._head) if self._head else self._read_frame()

    def _read_frame(self) -> tuple[int, bool]:
        """Bytes read of a frame, and whether the socket gave less than was asked."""
        space = self._frame_view[self._frame_filled_bytes :]
        num_bytes = self.sock.recv_into(space)
        self._note_frame_bytes(num_bytes)
        return num_bytes, num_bytes < len(space)

    def _read_entries(self, head: Announcement) -> tuple[int, bool]:
        wanted = head.num_blocks * wire.ENTRY_BYTES - len(self._entries)
        data = self.sock.recv(wanted)
        self._entries += data
        if len(data) == wanted:
            self._head = None
            columns = wire.parse_entries(self._entries)
            self._entries.clear()
            self._take_batch(head, columns)
            if self._batch is not None:
                return self._begin_batch(self._batch, len(data))
        return len(data), len(data) < wanted

    def _begin_batch(self, batch: IncomingBatch, before_bytes: int) -> tuple[int, bool]:
        """What has come of a batch that is inside its blocks, and was announced with so many bytes."""
        try:
            num_bytes, is_dry = self._read_batch(batch)
        except BlockingIOError:
            return before_bytes, True
        return before_bytes + num_bytes, is_dry

    def _read_batch(self, batch: IncomingBatch) -> tuple[int, bool]:
        """What has come of a batch; with the last bytes comes the next frame, in one call."""
        slices = batch.next_slices()
        wanted = sum(map(len, slices))
        space = [*slices, self._frame_view] if wanted == batch.num_bytes_left else slices
        received_bytes = 0
        try:
            received_bytes = self.sock.recvmsg_into(space)[0]
        finally:
            batch.wrote(min(received_bytes, wanted))
        if not batch.num_bytes_left:
            self._batch = None
            self._answer_run(batch.key, batch.answer)
            if received_bytes > wanted:
                self._note_frame_bytes(received_bytes - wanted)
        return received_bytes, received_bytes < sum(map(len, space))

    def _read_run(self, run: IncomingRun) -> tuple[int, bool]:
        """One slice of a run's payload; with the last one comes the next frame, in one call."""
        place = run.next_slice()
        is_last = len(place) == run.num_bytes_left and not self._runs
        space = [place, self._frame_view] if is_last else [place]
        received_bytes = written_bytes = 0
        try:
            received_bytes = self.sock.recvmsg_into(space)[0]
            written_bytes = min(received_bytes, len(place))
        finally:
            run.wrote(written_bytes)
        if not run.num_bytes_left:
            self._run = None
            self._note_answer(run)
            if received_bytes > written_bytes:
                self._note_frame_bytes(received_bytes - written_bytes)
        return received_bytes, received_bytes < sum(map(len, space))

    def _note_frame_bytes(self, num_bytes: int) -> None:
        self._frame_filled_bytes += num_bytes
        if self._frame_filled_bytes == wire.FRAME_BYTES:
            self._frame_filled_bytes = 0
            self._take_frame()

    def _take_frame(self) -> None:
        if not self._said_hello:
            self._take_hello(self._frame)
        elif self._frame[0] == FrameKind.OPEN:
            self._take_open(*wire.parse_open(self._frame))
        elif self._frame[0] == FrameKind.RUN and self.is_trusted:
            self._take_run(wire.parse_run(self._frame))
        elif self._frame[0] == FrameKind.RUNS and self.is_trusted:
            wire.num_entries(self._frame)  # refuses what nobody announces
            self._head = wire.parse_runs(self._frame)
        else:
            raise TransferError(f"frame of kind {self._frame[0]} where none may be")

    def _take_run(self, header: RunHeader) -> None:
        self._run = self._intake.begin(header, is_opened=header.key in self._opened)

    def _take_batch(self, head: Announcement, columns: Entries) -> None:
        batch = RunBatch(
            head.key, head.rank, head.group, head.first_layer, head.num_layers, head.num_bytes,
            columns.positions, columns.valid_slots,
        )  # fmt: skip
        incoming = IncomingBatch(self._intake, self, batch, columns.checksums, head.number)
        if incoming.begin(is_opened=head.key in self._opened):
            self._batch = incoming
            return
        self._answers.clear()
        self._runs.extend(
            batch.header(index, checksum, head.number)
            for index, checksum in enumerate(columns.checksums)
        )
        self._take_run(self._runs.popleft())

    def _note_answer(self, run: IncomingRun) -> None:
        """A run is over: answer it, or go on with the batch that it is of, which is answered as one."""
        self._answers.append(run.answer.is_admitted if run.answer else None)
        if self._runs:
            self._take_run(self._runs.popleft())
            return
        if None not in self._answers:
            answer = RunAnswer(run.header.number, all(self._answers))
            self._answer_run(run.header.key, answer)
        self._answers.clear()
