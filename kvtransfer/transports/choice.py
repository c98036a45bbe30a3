"""Several transports as one end: D takes in from all of them, P sends each session over one at a time.

A session that fails over one transport may be opened over another: D's coverage is one, whatever brings the bytes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from core.ids import SessionId
from kvtransfer.counters import TransferCounters
from kvtransfer.events import MoverEvent, PostEvent, SessionDrained, WriterLeft
from kvtransfer.plan import TransferPlan
from kvtransfer.session import (
    OutgoingPlan,
    ReceiveSession,
    SendSession,
    SessionKey,
    SourceBlock,
)
from kvtransfer.transports.base import Receiver, Sender
from kvtransfer.transports.intake import Intake


class Offer(NamedTuple):
    """One way to reach a receiver: the transport's kind and an address a rank."""

    kind: str
    addresses: Sequence[str]


class Receivers:
    """All ends of one worker that take runs in. Engine thread only."""

    def __init__(self, intake: Intake, receivers: Sequence[Receiver]) -> None:
        """receivers: best first; they share the intake, and all belong to this from now on."""
        self._intake = intake
        self._receivers = receivers

    @property
    def offers(self) -> list[Offer]:
        """Where senders reach this worker, best first."""
        return [Offer(end.kind, end.addresses) for end in self._receivers]

    @property
    def counters(self) -> TransferCounters:
        """Live counters of all of them."""
        return self._intake.counters

    def expect(self, session: ReceiveSession) -> None:
        """See `Receiver.expect`."""
        self._intake.expect(session)

    def forget(self, session: SessionId, attempt: int) -> None:
        """See `Receiver.forget`."""
        self._intake.forget(session, attempt)

    def close(self) -> None:
        """See `Receiver.close`."""
        for end in self._receivers:
            end.stop()
        self._intake.close()


class Senders:
    """All transports of one worker that sends. Engine thread only.

    Events of a session are those of the transport that it is open over; SessionDrained comes when none of those that
    it was ever open over reads any more.
    """

    def __init__(
        self, makers: Mapping[str, Callable[[PostEvent], Sender]], post: PostEvent
    ) -> None:
        """makers: by kind, what makes a sender that posts to where it is told."""
        self._post = post
        self._lock = threading.Lock()
        self._open_over: dict[SessionKey, str] = {}
        self._num_undrained: Counter[SessionKey] = Counter()
        self._senders: dict[str, Sender] = {}
        try:
            for kind, make in makers.items():
                self._senders[kind] = make(self._listen(kind))
        except BaseException:
            self.close()
            raise

    @property
    def counters(self) -> TransferCounters:
        """Sums over all of them, as of now."""
        return TransferCounters.sum_of(sender.counters for sender in self._senders.values())

    def usable(self, offers: Sequence[Offer], plan: TransferPlan) -> list[Offer]:
        """Those of a receiver's offers by which a plan can be carried out, one a kind, in the receiver's order."""
        first: dict[str, Offer] = {}
        for offer in offers:
            sender = self._senders.get(offer.kind)
            addresses = set(offer.addresses)  # one a rank, none twice
            if sender is None or len(addresses) != len(offer.addresses):
                continue
            if len(addresses) != plan.destination.num_ranks:
                continue
            if not plan.is_identity and not sender.carries_plans:
                continue
            if all(sender.reaches(address) for address in offer.addresses):
                first.setdefault(offer.kind, offer)
        return list(first.values())

    @property
    def kinds(self) -> list[str]:
        """What this worker can send over."""
        return list(self._senders)

    def open(
        self, key: SessionKey, secret: bytes, offer: Offer, plans: Sequence[OutgoingPlan] = ()
    ) -> None:
        """Begin a session over one of `usable`, or go on with it over another: push everything again.

        plans: one for each of D's ranks that gets something; none where runs keep their bytes and their place.
        """
        with self._lock:
            before = self._open_over.get(key)
            self._open_over[key] = offer.kind
            self._num_undrained[key] += 1
        if before is not None:
            self._senders[before].close_session(*key)
        sender = self._senders[offer.kind]
        for plan in plans:
            address = offer.addresses[plan.pair.destination_rank]
            sender.open(SendSession(*key, secret, address, plan))
        if not plans:
            sender.open(SendSession(*key, secret, offer.addresses[0]))

    def push(
        self,
        session: SessionId,
        attempt: int,
        group: int,
        blocks: Sequence[SourceBlock],
        first_layer: int,
        num_layers: int,
    ) -> None:
        """See `Sender.push`."""
        sender = self._senders[self._open_over[session, attempt]]
        sender.push(session, attempt, group, blocks, first_layer, num_layers)

    def close_session(self, session: SessionId, attempt: int) -> None:
        """See `Sender.close_session`."""
        with self._lock:
            kind = self._open_over.pop((session, attempt), None)
        if kind is not None:
            self._senders[kind].close_session(session, attempt)

    def close(self) -> None:
        """See `Sender.close`."""
        for sender in self._senders.values():
            sender.close()

    def _listen(self, kind: str) -> PostEvent:
        def hear(event: MoverEvent) -> None:
            if self._concerns(kind, event):
                self._post(event)

        return hear

    def _concerns(self, kind: str, event: MoverEvent) -> bool:
        """Whether an event of a transport is one of its session's own. On mover threads."""
        assert not isinstance(event, WriterLeft), "senders do not write into blocks"
        key = (event.session, event.attempt)
        with self._lock:
            if not isinstance(event, SessionDrained):
                return self._open_over.get(key) == kind
            self._num_undrained[key] -= 1
            if self._num_undrained[key]:
                return False
            del self._num_undrained[key]
            return key not in self._open_over
