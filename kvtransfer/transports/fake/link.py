"""One connection in memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from core.errors import TransferError
from kvtransfer.session import SessionKey
from kvtransfer.transports.fake.packets import AnswerPacket, OpenPacket, RunPacket
from kvtransfer.transports.incoming_run import IncomingRun, OpenOutcome

if TYPE_CHECKING:
    from kvtransfer.transports.fake.ends import FakeReceiver, FakeSender
    from kvtransfer.transports.fake.network import FakeNetwork


class FakeLink:
    """One connection: what is on its way, and how far the receiver has come with it."""

    def __init__(self, network: FakeNetwork, sender: FakeSender, receiver: FakeReceiver) -> None:
        self.sender = sender
        self.receiver = receiver
        self.forward: deque[OpenPacket | RunPacket] = deque()
        self.backward: deque[AnswerPacket] = deque()
        self.delayed: list[RunPacket] = []
        self.opened: set[SessionKey] = set()  # what the sender has sent an OPEN for
        self._accepted: set[SessionKey] = set()  # what the receiver has let in
        self._is_trusted = False
        self._network = network
        self._packet: RunPacket | None = None
        self._run: IncomingRun | None = None
        self._place: memoryview | None = None

    @property
    def can_deliver(self) -> bool:
        """Whether the receiver has something to take in."""
        return self._run is not None or bool(self.forward)

    @property
    def is_inside_slice(self) -> bool:
        """Whether the receiver stands inside a slice of a run."""
        return self._place is not None

    def deliver(self) -> None:
        """One step of the receiver: a frame, or the way into a slice, or the way out of it."""
        if self._run is None:
            packet = self.forward.popleft()
            if isinstance(packet, OpenPacket):
                self._take_open(packet)
            else:
                self._begin_run(packet)
        elif self._place is None:
            self._place = self._run.next_slice()[: self._slice_limit_bytes()]
        else:
            self._write_slice(self._run, self._place)

    def answer(self) -> None:
        """One answer reaches the sender."""
        self.sender.take_answer(self, self.backward.popleft())

    def end_receiving(self) -> None:
        """The receiver learns that nothing more comes: what is half there counts for nothing."""
        if self._run is not None:
            if self._place is not None:
                self._run.wrote(0)
            self.receiver.intake.abandon(self._run)
        self._run = self._packet = self._place = None
        self.forward.clear()
        self.delayed.clear()

    def _take_open(self, packet: OpenPacket) -> None:
        outcome = self.receiver.intake.open(packet.key, packet.secret)
        is_accepted = outcome is OpenOutcome.ACCEPTED
        self.backward.append(AnswerPacket(packet.key, 0, is_accepted))
        if outcome is OpenOutcome.STRANGER and not self._is_trusted:
            self.receiver.counters.refused_connections_total += 1
            self.answer()
            self._network.cut(self)
            return
        self._is_trusted |= outcome is not OpenOutcome.STRANGER
        if is_accepted:
            self._accepted.add(packet.key)
        else:
            self.receiver.counters.refused_sessions_total += 1

    def _begin_run(self, packet: RunPacket) -> None:
        try:
            is_opened = packet.header.key in self._accepted
            self._run = self.receiver.intake.begin(packet.header, is_opened=is_opened)
        except TransferError:
            self.receiver.counters.refused_connections_total += 1
            self._network.cut(self)
        else:
            self._packet = packet

    def _slice_limit_bytes(self) -> int:
        limit_bytes = self._network.slice_bytes
        if self._packet is not None and self._packet.cut_at_bytes is not None and self._run:
            num_bytes_done = self._run.header.num_bytes - self._run.num_bytes_left
            limit_bytes = min(limit_bytes, self._packet.cut_at_bytes - num_bytes_done)
        return limit_bytes

    def _write_slice(self, run: IncomingRun, place: memoryview) -> None:
        assert self._packet is not None
        start = run.header.num_bytes - run.num_bytes_left
        place[:] = self._packet.payload[start : start + len(place)]
        self._place = None
        run.wrote(len(place))
        if start + len(place) == self._packet.cut_at_bytes:
            self._network.cut(self)
        elif not run.num_bytes_left:
            self._run = None
            if run.answer is not None:
                self.backward.append(AnswerPacket(run.header.key, *run.answer))
