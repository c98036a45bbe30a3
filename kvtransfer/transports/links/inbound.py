"""D's end of one data connection, whatever carries it.

States: HELLO expected -> frames of a stranger (only OPEN) -> frames of a peer (OPEN, runs). A peer becomes one with
its first accepted OPEN. Anything else from a stranger ends the connection.

Where D fetches what a peer announces, some of it may be under way when the connection ends. Such a link is closed and
yet busy: it is advanced until it is not, or aborted.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod

from core.errors import TransferError
from kvtransfer.session import SessionKey
from kvtransfer.transports.incoming_run import OpenOutcome
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.wire import Answer, FrameKind, Hello
from kvtransfer.transports.runs import RunAnswer

READ_BUDGET_BYTES = 1 << 20
"""What one connection may bring before the others have a turn."""

_MAX_OPENED = 1024
"""Opened sessions of one connection after which those that have ended are dropped from memory."""

MAX_UNREAD_ANSWERS_BYTES = 1 << 20
"""Answers that a peer leaves unread before nothing more is read from it."""


class InboundLink(ABC):
    """One accepted connection. Belongs to the receiver's mover thread.

    `read`, `advance` and `flush` raise OSError when the connection is lost, TransferError when it is refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        intake: Intake,
        hello: Hello,
        deadline_s: float,
    ) -> None:
        self.sock = sock
        self.deadline_s = deadline_s
        self.is_trusted = False
        self.peer_name = ""
        self._intake = intake
        self._hello = hello
        self._said_hello = False
        self._opened: set[SessionKey] = set()
        self._out = bytearray()

    @abstractmethod
    def read(self) -> None:
        """Take in what has come, up to the budget."""

    @property
    def is_busy(self) -> bool:
        """Whether something is under way of which no socket tells; `advance` looks at it."""
        return False

    def advance(self) -> bool:
        """Go on with what is under way; whether anything has gone on. Also after `close`."""
        return False

    def abort(self) -> None:
        """`close`, when whatever fetches has ended: nothing is under way from now on."""
        self.close()

    @property
    def has_answers(self) -> bool:
        """Whether answers wait for the socket to take them."""
        return bool(self._out)

    @property
    def may_read(self) -> bool:
        """Whether the peer reads its answers, so that more may be taken from it."""
        return len(self._out) < MAX_UNREAD_ANSWERS_BYTES

    def flush(self) -> None:
        """Send the answers that the socket takes now."""
        if self._out:
            try:
                del self._out[: self.sock.send(self._out)]
            except BlockingIOError:
                pass

    def close(self) -> None:
        """Give the socket back; a run that is not all there counts for nothing."""
        self.sock.close()

    def _take_hello(self, frame: bytes | bytearray) -> None:
        theirs = wire.parse_hello(frame)
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
            self._intake.count(refused_sessions_total=1)
        # the secret of a session that has ended shows a peer, if a late one
        self.is_trusted |= outcome is not OpenOutcome.STRANGER

    def _answer_run(self, key: SessionKey, answer: RunAnswer | None) -> None:
        if answer is not None:
            self._out += wire.pack_answer(
                Answer(FrameKind.RUN, answer.is_admitted, key, answer.number)
            )
