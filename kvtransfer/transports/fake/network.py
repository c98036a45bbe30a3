"""Everything that is on its way between the ends of a test, and the order in which it moves.

Nothing moves by itself: `actions` lists what could happen next, `step` makes one of them happen,
`run` all of them in turn. Equal choices give equal histories. A run is sent in one action (its bytes
are read then), and delivered in several: into a slice, out of it, and so on, so that a test can look
or interfere while a writer is inside a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvtransfer.transports.base import MAX_SLICE_BYTES
from kvtransfer.transports.fake.ends import FakeReceiver, FakeSender
from kvtransfer.transports.fake.link import FakeLink
from kvtransfer.transports.fake.packets import Fault, RunPacket

Action = Callable[[], None]


class FakeNetwork:
    """Every end and every connection of one test."""

    def __init__(self, slice_bytes: int = MAX_SLICE_BYTES) -> None:
        self.slice_bytes = slice_bytes
        self.senders: list[FakeSender] = []
        self.links: list[FakeLink] = []
        self._receivers: dict[str, FakeReceiver] = {}
        self._current: dict[tuple[FakeSender, str], FakeLink] = {}
        self._faults: dict[int, Fault] = {}
        self._num_addresses = 0
        self._num_carried_runs = 0

    # ---- what a test does

    def inject(self, fault: Fault, at_run: int = 0) -> None:
        """Let a fault befall a run: the next one that is sent, or the `at_run`-th after it."""
        self._faults[self._num_carried_runs + at_run] = fault

    def release_delayed(self) -> None:
        """Runs that were delayed go on, behind what is on its way."""
        for link in self.links:
            link.forward.extend(link.delayed)
            link.delayed.clear()

    def actions(self) -> list[Action]:
        """What could happen next, in a fixed order."""
        sends: list[Action] = [
            partial(sender.send, lane)
            for sender in self.senders
            for lane in sender.outbox.lanes.values()
            if lane.has_runs()
        ]
        deliveries = [link.deliver for link in self.links if link.can_deliver]
        answers = [link.answer for link in self._current.values() if link.backward]
        return [*sends, *deliveries, *answers]

    def step(self, choose: Callable[[list[Action]], Action] | None = None) -> bool:
        """Let one thing happen, the first one or the one chosen; False when nothing can."""
        actions = self.actions()
        if actions:
            (choose(actions) if choose else actions[0])()
        return bool(actions)

    def run(self, max_steps: int = 1_000_000) -> None:
        """Let everything happen."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def cut(self, link: FakeLink) -> None:
        """Both ends learn that a connection is lost; what is on its way is lost with it."""
        self.cut_for_sender(link)
        self.cut_for_receiver(link)

    def cut_for_sender(self, link: FakeLink) -> None:
        """Half open: the sender takes the connection for lost, the receiver does not."""
        address = link.receiver.addresses[0]
        if self._current.get((link.sender, address)) is link:
            del self._current[link.sender, address]
            link.backward.clear()
            link.sender.counters.connections_lost_total += 1
            link.sender.lose(address, "connection cut")

    def cut_for_receiver(self, link: FakeLink) -> None:
        """The receiver takes a connection for lost."""
        if link in self.links:
            self.links.remove(link)
            link.receiver.counters.connections_lost_total += 1
            link.end_receiving()

    def notice_losses(self) -> None:
        """Senders learn of every connection that its receiver has taken for lost."""
        for link in [link for link in self._current.values() if link not in self.links]:
            self.cut_for_sender(link)

    # ---- what the ends do

    def add_receiver(self, receiver: FakeReceiver) -> str:
        """An address for a new receiver."""
        self._num_addresses += 1
        address = f"fake:{self._num_addresses}"
        self._receivers[address] = receiver
        return address

    def remove_receiver(self, address: str) -> None:
        """A receiver is gone."""
        self._receivers.pop(address, None)
        for link in [x for x in self.links if x.receiver.addresses[0] == address]:
            self.cut(link)

    def remove_sender(self, sender: FakeSender, *, is_noticed: bool = True) -> None:
        """A sender is gone, once; where nobody notices, what it had sent still arrives."""
        if sender not in self.senders:
            return
        self.senders.remove(sender)
        for link in [x for x in self.links if x.sender is sender]:
            self._current.pop((sender, link.receiver.addresses[0]), None)
            if is_noticed:
                self.cut_for_receiver(link)

    def connect(self, sender: FakeSender, address: str) -> FakeLink | None:
        """The connection of a pair, new when there is none; None when nobody listens."""
        receiver = self._receivers.get(address)
        link = self._current.get((sender, address))
        if link is None and receiver is not None:
            link = self._current[sender, address] = FakeLink(self, sender, receiver)
            self.links.append(link)
        return link

    def carry(self, link: FakeLink, packet: RunPacket) -> None:
        """Put a run on a connection, as the script has it."""
        fault = self._faults.pop(self._num_carried_runs, None)
        self._num_carried_runs += 1
        if fault is Fault.CORRUPT:
            flipped = bytes([packet.payload[-1] ^ 1])
            packet = replace(packet, payload=packet.payload[:-1] + flipped)
        elif fault is Fault.CUT:
            packet = replace(packet, cut_at_bytes=len(packet.payload) // 2)
        if fault is Fault.DELAY:
            link.delayed.append(packet)
        elif fault is Fault.REORDER and link.forward and isinstance(link.forward[-1], RunPacket):
            link.forward.insert(len(link.forward) - 1, packet)
        elif fault is not Fault.DROP:
            link.forward.append(packet)
        if fault is Fault.DUPLICATE:
            link.forward.append(packet)
