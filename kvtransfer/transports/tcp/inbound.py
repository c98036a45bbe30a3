"""D's end of one data connection.

States: HELLO expected -> frames of a stranger (only OPEN) -> frames of a peer (OPEN, RUN + payload).
A peer becomes one with its first accepted OPEN. Anything else from a stranger ends the connection.
"""

from __future__ import annotations

import socket

from core.errors import TransferError
from kvtransfer.counters import TransferCounters
from kvtransfer.session import SessionKey
from kvtransfer.transports.intake import IncomingRun, Intake, OpenOutcome
from kvtransfer.transports.runs import RunAnswer, RunHeader
from kvtransfer.transports.tcp import wire
from kvtransfer.transports.tcp.wire import Answer, FrameKind, Hello

READ_BUDGET_BYTES = 1 << 20
"""What one connection may bring before the others have a turn."""

_MAX_OPENED = 1024
"""Opened sessions of one connection after which those that have ended are dropped from memory."""

MAX_UNREAD_ANSWERS_BYTES = 1 << 20
"""Answers that a peer leaves unread before nothing more is read from it."""


class InboundLink:
    """One accepted connection. Belongs to the receiver's mover thread.

    `read` and `flush` raise OSError when the connection is lost, TransferError when it is refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        intake: Intake,
        hello: Hello,
        counters: TransferCounters,
        deadline_s: float,
    ) -> None:
        self.sock = sock
        self.deadline_s = deadline_s
        self.is_trusted = False
        self.peer_name = ""
        self._intake = intake
        self._hello = hello
        self._counters = counters
        self._said_hello = False
        self._opened: set[SessionKey] = set()
        self._frame = bytearray(wire.FRAME_BYTES)
        self._frame_view = memoryview(self._frame)
        self._frame_filled_bytes = 0
        self._run: IncomingRun | None = None
        self._out = bytearray()

    @property
    def has_answers(self) -> bool:
        """Whether answers wait for the socket to take them."""
        return bool(self._out)

    @property
    def may_read(self) -> bool:
        """Whether the peer reads its answers, so that more may be taken from it."""
        return len(self._out) < MAX_UNREAD_ANSWERS_BYTES

    def read(self) -> None:
        """Take in what has come, up to the budget."""
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

    def flush(self) -> None:
        """Send the answers that the socket takes now."""
        if self._out:
            try:
                del self._out[: self.sock.send(self._out)]
            except BlockingIOError:
                pass

    def close(self) -> None:
        """Give the socket back; a half-received run counts for nothing."""
        if self._run is not None:
            self._intake.abandon(self._run)
            self._run = None
        self.sock.close()

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
            self._answer_run(run.header, run.answer)
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
            self._take_hello()
        elif self._frame[0] == FrameKind.OPEN:
            self._take_open(*wire.parse_open(self._frame))
        elif self._frame[0] == FrameKind.RUN and self.is_trusted:
            self._take_run(wire.parse_run(self._frame))
        else:
            raise TransferError(f"frame of kind {self._frame[0]} where none may be")

    def _take_hello(self) -> None:
        theirs = wire.parse_hello(self._frame)
        self._said_hello = True
        self.peer_name = theirs.name
        self._out += wire.pack_hello(self._hello)
        wire.check_versions(self._hello, theirs)

    def _take_open(self, key: SessionKey, secret: bytes) -> None:
        outcome = self._intake.open(key, secret)
        is_accepted = outcome is OpenOutcome.ACCEPTED
        self._out += wire.pack_answer(Answer(FrameKind.OPEN, is_accepted, key, 0))
        if outcome is OpenOutcome.STRANGER and not self.is_trusted:
            raise TransferError(f"no right to session {key[0]}, attempt {key[1]}")
        if is_accepted:
            self._opened.add(key)
            if len(self._opened) > _MAX_OPENED:
                self._opened = {key for key in self._opened if self._intake.is_expected(key)}
        else:
            self._counters.refused_sessions_total += 1
        # the secret of a session that has ended shows a peer, if a late one
        self.is_trusted |= outcome is not OpenOutcome.STRANGER

    def _take_run(self, header: RunHeader) -> None:
        self._run = self._intake.begin(header, is_opened=header.key in self._opened)

    def _answer_run(self, header: RunHeader, answer: RunAnswer | None) -> None:
        if answer is not None:
            self._out += wire.pack_answer(
                Answer(FrameKind.RUN, answer.is_admitted, header.key, answer.number)
            )
