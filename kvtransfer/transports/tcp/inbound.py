"""D's end of one tcp connection: frames, each RUN followed by its payload, which goes straight into the pool."""

from __future__ import annotations

import socket

from core.errors import TransferError
from kvtransfer.counters import TransferCounters
from kvtransfer.transports.intake import IncomingRun, Intake
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.inbound import READ_BUDGET_BYTES, InboundLink
from kvtransfer.transports.links.wire import FrameKind, Hello
from kvtransfer.transports.runs import RunHeader


class TcpInbound(InboundLink):
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
        self._frame = bytearray(wire.FRAME_BYTES)
        self._frame_view = memoryview(self._frame)
        self._frame_filled_bytes = 0
        self._run: IncomingRun | None = None

    def read(self) -> None:
        """See InboundLink.read."""
        budget_bytes = READ_BUDGET_BYTES
        while budget_bytes > 0:
            try:
                num_bytes, is_dry = self._read_run() if self._run else self._read_frame()
            except BlockingIOError:
                return
            if num_bytes == 0:
                raise ConnectionResetError("peer closed the connection")
            if is_dry:
                return
            budget_bytes -= num_bytes

    def close(self) -> None:
        """See InboundLink.close."""
        if self._run is not None:
            self._intake.abandon(self._run)
            self._run = None
        super().close()

    def _read_frame(self) -> tuple[int, bool]:
        """Bytes read of a frame, and whether the socket gave less than was asked."""
        space = self._frame_view[self._frame_filled_bytes :]
        num_bytes = self.sock.recv_into(space)
        self._note_frame_bytes(num_bytes)
        return num_bytes, num_bytes < len(space)

    def _read_run(self) -> tuple[int, bool]:
        """One slice of a run's payload; with the last one comes the next frame, in one call."""
        run = self._run
        assert run is not None
        place = run.next_slice()
        space = [place, self._frame_view] if len(place) == run.num_bytes_left else [place]
        received_bytes = written_bytes = 0
        try:
            received_bytes = self.sock.recvmsg_into(space)[0]
            written_bytes = min(received_bytes, len(place))
        finally:
            run.wrote(written_bytes)
        if not run.num_bytes_left:
            self._run = None
            self._answer_run(run.header.key, run.answer)
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
        else:
            raise TransferError(f"frame of kind {self._frame[0]} where none may be")

    def _take_run(self, header: RunHeader) -> None:
        self._run = self._intake.begin(header, is_opened=header.key in self._opened)
