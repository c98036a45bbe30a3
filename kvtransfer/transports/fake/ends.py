"""Both ends of the transport in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.blocks import BlockLife
from core.errors import PeerLost, TransferError
from core.ids import SessionId
from core.kv_layout import KVLayout
from kvtransfer.config import TransferConfig
from kvtransfer.counters import TransferCounters
from kvtransfer.events import PostEvent
from kvtransfer.session import (
    OutgoingPlan,
    ReceiveSession,
    SendSession,
    SessionKey,
    SourceBlock,
)
from kvtransfer.transports.fake.packets import AnswerPacket, OpenPacket, RunPacket
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.outbox import Outbox, pushed_bytes
from kvtransfer.transports.outgoing import Lane
from kvtransfer.transports.runs import RunAnswer

if TYPE_CHECKING:
    from kvtransfer.transports.fake.link import FakeLink
    from kvtransfer.transports.fake.network import FakeNetwork


class FakeReceiver:
    """`transports.base.Receiver` on a FakeNetwork."""

    def __init__(
        self,
        network: FakeNetwork,
        life: BlockLife,
        pool: memoryview,
        layout: KVLayout,
        post: PostEvent,
        rank: int = 0,
    ) -> None:
        self._network = network
        self.intake = Intake(life, pool, layout, post, rank)
        self._counters = self.intake.counters
        self._address = network.add_receiver(self)

    @property
    def kind(self) -> str:
        """The transport's name in offers."""
        return "fake"

    @property
    def addresses(self) -> list[str]:
        """Where senders reach this end."""
        return [self._address]

    @property
    def counters(self) -> TransferCounters:
        """Live counters of this end."""
        return self._counters

    def expect(self, session: ReceiveSession) -> None:
        """See `Receiver.expect`."""
        self.intake.expect(session)

    def forget(self, session: SessionId, attempt: int) -> None:
        """See `Receiver.forget`."""
        self.intake.forget(session, attempt)

    def stop(self) -> None:
        """See `Receiver.stop`."""
        self._network.remove_receiver(self._address)

    def close(self) -> None:
        """See `Receiver.close`."""
        self.stop()
        self.intake.close()


class FakeSender:
    """`transports.base.Sender` on a FakeNetwork."""

    def __init__(
        self,
        network: FakeNetwork,
        pool: memoryview,
        layout: KVLayout,
        post: PostEvent,
        config: TransferConfig,
        rank: int = 0,
    ) -> None:
        self._network = network
        self._config = config
        self._counters = TransferCounters()
        self._num_failures: dict[str, int] = {}
        self._open_plans: dict[SessionKey, dict[str, OutgoingPlan | None]] = {}  # by address
        self.outbox = Outbox(
            pool, layout, post, self._counters, window_bytes=config.window_bytes, rank=rank
        )
        network.senders.append(self)

    @property
    def kind(self) -> str:
        """The transport's name in offers."""
        return "fake"

    @property
    def counters(self) -> TransferCounters:
        """Live counters of this end."""
        return self._counters

    @property
    def carries_plans(self) -> bool:
        """See `Sender.carries_plans`."""
        return True

    def reaches(self, address: str) -> bool:
        """See `Sender.reaches`."""
        return True

    def open(self, session: SendSession) -> None:
        """See `Sender.open`."""
        plans = self._open_plans.setdefault(session.key, {})
        assert session.address not in plans, f"session {session.key} is open there already"
        plans[session.address] = session.plan
        self.outbox.open(session)

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
        key, layers = (session, attempt), (first_layer, num_layers)
        plans = list(self._open_plans.get(key, {}).values())
        num_bytes = pushed_bytes(self.outbox.layout, plans, group, blocks, layers)
        self._counters.pushed_bytes_total += num_bytes
        self.outbox.push(key, group, blocks, layers, num_bytes)

    def close_session(self, session: SessionId, attempt: int) -> None:
        """See `Sender.close_session`. What is on its way is a copy, so nothing has to be drained."""
        self._open_plans.pop((session, attempt), None)
        self.outbox.close_session((session, attempt))

    def close(self) -> None:
        """See `Sender.close`."""
        self._network.remove_sender(self)
        self.outbox.close()

    def send(self, lane: Lane) -> None:
        """Put the lane's next frame on its connection, made when there is none."""
        link = self._network.connect(self, lane.address)
        if link is None:
            self.lose(lane.address, "nobody listens")
            return
        session = lane.next_session()
        if session.key not in link.opened:
            link.opened.add(session.key)
            link.forward.append(OpenPacket(session.key, session.secret))
            return
        run = lane.take()
        self._counters.sent_runs_total += 1
        self._counters.sent_bytes_total += run.num_bytes
        (payload,) = self.outbox.payloads(run)
        self._network.carry(link, RunPacket(run.header(payload), bytes(payload)))

    def take_answer(self, link: FakeLink, answer: AnswerPacket) -> None:
        """The receiver has spoken."""
        address = link.receiver.addresses[0]
        lane = self.outbox.lanes[address]
        refusal = f"the receiver refuses session {answer.key}: unknown or ended"
        if answer.number:
            self._num_failures[address] = 0
            run_answer = RunAnswer(answer.number, answer.is_accepted)
            self.outbox.answered(lane, answer.key, run_answer, refusal)
        elif not answer.is_accepted:
            link.opened.discard(answer.key)
            if (session := lane.sessions.get(answer.key)) is not None:
                self.outbox.fail(session, TransferError(refusal))

    def lose(self, address: str, reason: str) -> None:
        """The connection to an address is lost, or could not be made."""
        lane = self.outbox.lanes.get(address)
        if lane is None:
            return
        lane.requeue()
        if lane.needs_link():
            failures = self._num_failures[address] = self._num_failures.get(address, 0) + 1
            if failures >= self._config.max_connect_failures:
                self._num_failures[address] = 0
                self.outbox.fail_lane(lane, PeerLost(f"{address} is lost: {reason}"))
