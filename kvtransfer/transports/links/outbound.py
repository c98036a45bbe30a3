"""P's end of one data connection, and its coming and going.

    IDLE --something to send--> CONNECTING --> GREETING --HELLO--> READY
    CONNECTING, GREETING, READY --lost--> WAITING (a pause that doubles) --> CONNECTING
    lost with nothing to send or to be answered --> IDLE
    lost too often in a row, or refused by version --> IDLE, and the sessions failed

An answer ends the count of failures. What was unanswered when a connection was lost is sent again on
the next one; the receiver's coverage makes that harmless.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from enum import Enum, auto
from typing import Protocol

from core.errors import PeerLost, TransferError, TransferTimeout
from kvtransfer.config import TransferConfig
from kvtransfer.session import SessionKey
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.wire import Answer, FrameKind
from kvtransfer.transports.outbox import Outbox
from kvtransfer.transports.outgoing import Lane, OutgoingRun, OutgoingSession
from kvtransfer.transports.runs import RunAnswer

_ANSWER_BUFFER_BYTES = wire.ANSWER_BYTES * 2048
_MAX_BUFFERS = 64


class LinkState(Enum):
    """How far a connection is."""

    IDLE = auto()
    CONNECTING = auto()
    GREETING = auto()
    READY = auto()
    WAITING = auto()


class _Piece:
    """What waits for the socket: a frame, with the payload of its run if it is of one.

    views, num_bytes: what is left of it, in order.
    bytes_beside: bytes that go another way, once these are sent.
    is_begun: whether something of it is on the wire.
    """

    __slots__ = ("bytes_beside", "is_begun", "num_bytes", "run", "views")

    def __init__(
        self, views: list[memoryview], run: OutgoingRun | None = None, bytes_beside: int = 0
    ) -> None:
        self.views = views
        self.num_bytes = sum(map(len, views))
        self.run = run
        self.bytes_beside = bytes_beside
        self.is_begun = False

    def note_sent(self, num_bytes: int) -> None:
        """Some bytes of it, not all, are on the wire."""
        self.is_begun = True
        self.num_bytes -= num_bytes
        index = 0
        while num_bytes >= len(self.views[index]):
            num_bytes -= len(self.views[index])
            index += 1
        self.views = self.views[index:]
        self.views[0] = self.views[0][num_bytes:]


class OutboundCarrier(Protocol):
    """What one kind of connection does in its own way, on P's end."""

    def connect(self, address: str) -> socket.socket:
        """A non-blocking socket on its way to a receiver.

        Raises OSError when trying again may help, TransferError when it will not.
        """
        ...

    def greet(self, sock: socket.socket, hello: bytes) -> None:
        """Send the first bytes."""
        ...

    def pieces(self, run: OutgoingRun) -> list[memoryview]:
        """What goes over the connection for a run, in order; read until it is sent."""
        ...

    def bytes_beside(self, run: OutgoingRun) -> int:
        """Bytes of a run that go another way; they count against the link's rate."""
        ...


class OutboundLink:
    """The connection to one receiver. Belongs to the sender's mover thread; raises nothing."""

    def __init__(
        self,
        lane: Lane,
        outbox: Outbox,
        carrier: OutboundCarrier,
        config: TransferConfig,
        selector: selectors.BaseSelector,
    ) -> None:
        self.lane = lane
        self.state = LinkState.IDLE
        self._outbox = outbox
        self._carrier = carrier
        self._config = config
        self._selector = selector
        self._hello = wire.Hello(wire.PROTOCOL_VERSION, config.worker_name)
        self._sock: socket.socket | None = None
        self._out: deque[_Piece] = deque()
        self._out_bytes = 0
        self._is_blocked = False
        self._opened: set[SessionKey] = set()
        self._is_trusted = False
        self._answers = bytearray(_ANSWER_BUFFER_BYTES)
        self._answers_filled_bytes = 0
        self._num_failures = 0
        self._deadline_s = 0.0

    # ---- what the sender's loop asks

    @property
    def can_send(self) -> bool:
        """Whether `send` would find bytes and a socket that takes them."""
        if self.state is not LinkState.READY or self._is_blocked:
            return False
        return bool(self._out) or (self.lane.has_runs() and not self._awaits_trust)

    @property
    def wait_until_s(self) -> float | None:
        """When `advance` has something to do although nothing happens."""
        is_timed = self.state in (LinkState.CONNECTING, LinkState.GREETING, LinkState.WAITING)
        return self._deadline_s if is_timed else None

    @property
    def is_unused(self) -> bool:
        """Whether the link can be thrown away: no connection, no session."""
        return self.state is LinkState.IDLE and not self.lane.sessions

    def advance(self, now_s: float) -> None:
        """Connect when there is need; give up what takes too long."""
        if self.state is LinkState.READY:
            return
        is_due = now_s >= self._deadline_s
        if self.state is LinkState.IDLE or (self.state is LinkState.WAITING and is_due):
            if self.lane.needs_link():
                self._connect(now_s)
            else:
                self.state = LinkState.IDLE
        elif is_due and self.state in (LinkState.CONNECTING, LinkState.GREETING):
            limit_s = self._config.connect_timeout_s
            self._lose(TransferTimeout(f"no handshake within {limit_s} s"), now_s)

    def handle(self, mask: int, now_s: float) -> None:
        """The selector has seen something on the socket."""
        try:
            if self.state is LinkState.CONNECTING and mask & selectors.EVENT_WRITE:
                self._greet()
            elif mask & selectors.EVENT_WRITE:
                self._set_blocked(False)
            if mask & selectors.EVENT_READ:
                self._read()
        except OSError as error:
            self._lose(error, now_s)
        except TransferError as error:
            self._reject(error)

    def send(self, max_bytes: int, now_s: float) -> int:
        """Send about this many bytes at most; how many went, also beside the socket."""
        assert self._sock is not None
        self._fill(max_bytes)
        buffers = self._gather(max_bytes)
        try:
            num_bytes = self._sock.sendmsg(buffers)
        except BlockingIOError:
            num_bytes = 0
        except OSError as error:
            self._lose(error, now_s)
            return 0
        num_beside = self._note_sent(num_bytes)
        if num_bytes < sum(map(len, buffers)):
            self._set_blocked(True)
        return num_bytes + num_beside

    def detach(self, session: OutgoingSession) -> None:
        """From now on read no bytes of a session from the pool.

        A run that is half on the wire is finished from a copy of its rest, so that neither the peer
        nor the other sessions of the connection have to be waited for. It is one run at most.
        """
        kept: deque[_Piece] = deque()
        for piece in self._out:
            if piece.run is None or piece.run.session is not session:
                kept.append(piece)
            elif piece.is_begun:
                piece.views = [memoryview(bytes(view)) for view in piece.views]
                kept.append(piece)
        self._out = kept
        self._out_bytes = sum(piece.num_bytes + piece.bytes_beside for piece in kept)
        if self._is_trusted:  # before that, the open is still owed an answer
            self._opened.discard(session.key)

    def close(self) -> None:
        """Give the socket and all views of the pool back."""
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None
        self._out.clear()
        self._out_bytes = 0
        self._opened.clear()
        self._is_trusted = self._is_blocked = False
        self._answers_filled_bytes = 0
        self.state = LinkState.IDLE

    # ---- coming and going

    def _connect(self, now_s: float) -> None:
        try:
            self._sock = self._carrier.connect(self.lane.address)
        except OSError as error:
            self._lose(error, now_s)
        except TransferError as error:
            self._reject(error)
        else:
            self.state = LinkState.CONNECTING
            self._deadline_s = now_s + self._config.connect_timeout_s
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.register(self._sock, events, self)

    def _greet(self) -> None:
        assert self._sock is not None
        error_number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error_number:
            raise ConnectionError(error_number, "cannot connect")
        self.state = LinkState.GREETING
        self._carrier.greet(self._sock, wire.pack_hello(self._hello))  # the buffer has room
        self._selector.modify(self._sock, selectors.EVENT_READ, self)

    def _lose(self, error: Exception, now_s: float) -> None:
        if self.state is LinkState.READY:
            self._outbox.counters.connections_lost_total += 1
        self.close()
        self.lane.requeue()
        if not self.lane.needs_link():
            return
        self._num_failures += 1
        if self._num_failures >= self._config.max_connect_failures:
            self._num_failures = 0
            message = f"data connection to {self.lane.address} is lost: {error}"
            self._outbox.fail_lane(self.lane, PeerLost(message))
            return
        self.state = LinkState.WAITING
        pause_s = self._config.reconnect_delay_s * 2 ** (self._num_failures - 1)
        self._deadline_s = now_s + pause_s

    def _reject(self, error: TransferError) -> None:
        """The peer speaks another language: trying again is of no use."""
        self.close()
        self.lane.requeue()
        self._outbox.fail_lane(self.lane, error)

    # ---- reading

    def _read(self) -> None:
        assert self._sock is not None
        view = memoryview(self._answers)
        while True:
            space = view[self._answers_filled_bytes :]
            try:
                num_bytes = self._sock.recv_into(space)
            except BlockingIOError:
                return
            if num_bytes == 0:
                raise ConnectionResetError("the receiver closed it")
            self._answers_filled_bytes += num_bytes
            self._take_answers(view)
            if num_bytes < len(space) or self._sock is None:
                return

    def _take_answers(self, view: memoryview) -> None:
        start = 0
        if self.state is LinkState.GREETING:
            if self._answers_filled_bytes < wire.FRAME_BYTES:
                return
            start = wire.FRAME_BYTES
            wire.check_versions(self._hello, wire.parse_hello(self._answers[:start]))
            self.state = LinkState.READY
        filled = self._answers_filled_bytes
        end = filled - (filled - start) % wire.ANSWER_BYTES
        for answer in wire.parse_answers(view[start:end]):
            self._take_answer(answer)
        self._answers[: filled - end] = self._answers[end:filled]
        self._answers_filled_bytes = filled - end

    def _take_answer(self, answer: Answer) -> None:
        session, attempt = answer.key
        refusal = (
            f"{self.lane.address} refuses session {session}, attempt {attempt}: unknown or ended"
        )
        if answer.kind is FrameKind.OPEN:
            self._is_trusted |= answer.is_accepted
            if not answer.is_accepted:
                self._opened.discard(answer.key)
                if (found := self.lane.sessions.get(answer.key)) is not None:
                    self._outbox.fail(found, TransferError(refusal))
        else:
            self._num_failures = 0  # a session let in is no progress yet
            run_answer = RunAnswer(answer.number, answer.is_accepted)
            self._outbox.answered(self.lane, answer.key, run_answer, refusal)

    # ---- writing

    @property
    def _awaits_trust(self) -> bool:
        return bool(self._opened) and not self._is_trusted

    def _fill(self, max_bytes: int) -> None:
        """Put frames and payloads of the next runs in line, up to this many bytes."""
        while self._out_bytes < max_bytes and self.lane.has_runs() and not self._awaits_trust:
            session = self.lane.next_session()
            if session.key not in self._opened:
                self._opened.add(session.key)
                frame = wire.pack_open(session.key, session.secret)
                self._append(_Piece([memoryview(frame)]))
                continue
            run = self.lane.take()
            self._append(_Piece(self._carrier.pieces(run), run, self._carrier.bytes_beside(run)))

    def _append(self, piece: _Piece) -> None:
        self._out.append(piece)
        self._out_bytes += piece.num_bytes + piece.bytes_beside

    def _gather(self, max_bytes: int) -> list[memoryview]:
        buffers: list[memoryview] = []
        for piece in self._out:
            for view in piece.views:
                if max_bytes <= 0 or len(buffers) == _MAX_BUFFERS:
                    return buffers
                buffers.append(view if len(view) <= max_bytes else view[:max_bytes])
                max_bytes -= len(view)
        return buffers

    def _note_sent(self, num_bytes: int) -> int:
        """Take what the socket took out of the line; how many bytes that sets free beside it."""
        num_beside, self._out_bytes = 0, self._out_bytes - num_bytes
        while self._out and num_bytes >= self._out[0].num_bytes:
            piece = self._out.popleft()
            num_bytes -= piece.num_bytes
            num_beside += piece.bytes_beside
            if piece.run is not None:
                self._outbox.counters.sent_runs_total += len(piece.run.sources)
                self._outbox.counters.sent_bytes_total += piece.run.num_bytes
        if num_bytes:
            self._out[0].note_sent(num_bytes)
        self._out_bytes -= num_beside
        return num_beside

    def _set_blocked(self, is_blocked: bool) -> None:
        assert self._sock is not None
        self._is_blocked = is_blocked
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_blocked else 0)
        self._selector.modify(self._sock, events, self)
