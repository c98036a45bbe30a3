"""Random lives of many sessions: starts, aborts, new attempts, lost connections, in any order.

An engine's part is played on both sides. Blocks go back to their pools by the rules of the contract
and are given out again at once, with other bytes, so that a byte read or written too late shows.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace

import pytest

from core.errors import ChecksumMismatch
from core.ids import BlockId, SessionId
from kvtransfer.events import (
    BlocksAcknowledged,
    MoverEvent,
    ReceiveFailed,
    SendFailed,
    SessionComplete,
    SessionDrained,
    WriterLeft,
)
from kvtransfer.session import SessionKey
from kvtransfer.transports.fake.network import FakeNetwork
from kvtransfer.transports.fake.packets import Fault
from tests.kvtransfer.harness import ENGINES, FAST, Pair, Transfer, make_layout, pair

NUM_BLOCKS = 48
FAULTS = (Fault.DELAY, Fault.REORDER, Fault.DUPLICATE, Fault.CUT, Fault.DROP)


@dataclass
class Session:
    """One attempt as both engines see it."""

    transfer: Transfer
    content: dict[BlockId, bytes]  # D's block -> what P's block held when it was pinned
    to_push: list[tuple[int, int, int]]  # (group, layer, position) not yet pushed
    is_wanted: bool = True  # D has not forgotten it
    is_closed: bool = False  # P has closed it


@dataclass
class Engines:
    """D's and P's engine in one, with a seed."""

    p: Pair
    rng: random.Random
    sessions: dict[SessionKey, Session] = field(default_factory=dict)
    source_free: set[BlockId] = field(default_factory=set)
    num_seen: int = 0
    num_sent_seen: int = 0
    num_complete: int = 0
    num_given_up: int = 0

    def start(self, session: SessionId | None = None, attempt: int = 0) -> None:
        """A session for a prompt of random length, if both pools have room."""
        layout = self.p.layout
        num_tokens = self.rng.randrange(1, 6 * layout.block_size)
        num_blocks = layout.num_blocks(num_tokens) * len(layout.groups)
        if num_blocks > min(len(self.source_free), NUM_BLOCKS - 1 - len(self.p.taken)):
            return
        picks = self.rng.sample(sorted(self.source_free), num_blocks)
        self.source_free.difference_update(picks)
        size = layout.block_bytes
        for block in picks:
            self.p.memory.generations[block] += 1
            self.p.source[block * size : (block + 1) * size] = self.rng.randbytes(size)
        transfer = self.p.transfer(num_tokens, session=session, attempt=attempt, picks=picks)
        content = {
            d.block: bytes(self.p.source[s.block * size : (s.block + 1) * size])
            for sources, destinations in zip(transfer.sources, transfer.destinations, strict=True)
            for s, d in zip(sources, destinations, strict=True)
        }
        to_push = [
            (group, layer, source.position)
            for group, sources in enumerate(transfer.sources)
            for layer in range(len(layout.groups[group].layers))
            for source in sources
        ]
        self.sessions[transfer.key] = Session(transfer, content, to_push[::-1])
        self.p.expect(transfer)
        self.p.open(transfer)

    def push(self, session: Session) -> None:
        for _ in range(self.rng.randrange(1, 24)):
            if session.to_push and not session.is_closed:
                group, layer, position = session.to_push.pop()
                self.p.push_some(session.transfer, position, layer, 1, group=group)

    def forget(self, session: Session) -> None:
        """D's end of a session: whatever is not read out by now is given up."""
        if session.is_wanted:
            session.is_wanted = False
            self.p.give_up(session.transfer)

    def close(self, session: Session) -> None:
        if not session.is_closed:
            session.is_closed = True
            self.p.sender.close_session(*session.transfer.key)

    def give_up(self, session: Session) -> None:
        """D turns to the next attempt; P hears of it later, or not before its lease ends."""
        if session.is_wanted:
            self.num_given_up += 1
            self.forget(session)
            if self.rng.random() < 0.5:
                self.close(session)
            if self.rng.random() < 0.7:
                name, attempt = session.transfer.key
                self.start(name, attempt + 1)

    def act(self) -> None:
        """One thing that an engine may do."""
        active = list(self.sessions.values())
        dice = self.rng.random()
        if not active or dice < 0.15:
            self.start()
        elif dice < 0.9:
            self.push(self.rng.choice(active))
        elif dice < 0.95:
            self.give_up(self.rng.choice(active))
        elif dice < 0.97:
            self.close(self.rng.choice(active))

    def take_events(self) -> None:
        while self.num_seen < len(self.p.received):
            event = self.p.received[self.num_seen]
            self.num_seen += 1
            self.take(event)
        while self.num_sent_seen < len(self.p.sent):
            event = self.p.sent[self.num_sent_seen]
            self.num_sent_seen += 1
            self.take(event)

    def take(self, event: MoverEvent) -> None:
        if isinstance(event, WriterLeft):
            self.p.settle(event.block)
        elif isinstance(event, SessionComplete):
            self.complete(self.sessions.get((event.session, event.attempt)))
        elif isinstance(event, ReceiveFailed):
            assert not isinstance(event.error, ChecksumMismatch), "bytes changed under a sender"
            raise AssertionError(event.error.message)
        elif isinstance(event, SessionDrained):
            session = self.sessions[event.session, event.attempt]
            assert session.is_closed
            self.source_free |= {s.block for group in session.transfer.sources for s in group}
            self.drop_when_over(session, is_drained=True)
        elif isinstance(event, SendFailed):
            session = self.sessions[event.session, event.attempt]
            self.close(session)

    def complete(self, session: Session | None) -> None:
        if session is None or not session.is_wanted:
            return  # an event that crossed our own word
        size = self.p.layout.block_bytes
        for group, destinations in enumerate(session.transfer.destinations):
            used = self.p.layout.groups[group].used_bytes(self.p.layout.block_size)
            for destination in destinations:
                start = destination.block * size
                held = self.p.destination[start : start + used]
                assert held == session.content[destination.block][:used], "wrong bytes"
        self.num_complete += 1
        self.forget(session)
        self.close(session)

    def drop_when_over(self, session: Session, *, is_drained: bool) -> None:
        if is_drained:
            self.forget(session)
            del self.sessions[session.transfer.key]

    def end(self) -> None:
        """Every session ends, and nothing is held."""
        for session in list(self.sessions.values()):
            self.forget(session)
            self.close(session)


def check_idle(engines: Engines) -> None:
    p = engines.p
    assert not engines.sessions
    assert len(engines.source_free) == NUM_BLOCKS - 1
    assert not p.taken
    assert p.life.num_live_permits == 0
    p.assert_idle()


def new_engines(p: Pair, seed: int) -> Engines:
    return Engines(p, random.Random(seed), source_free={BlockId(b) for b in range(1, NUM_BLOCKS)})


def disturb(network: FakeNetwork, rng: random.Random) -> None:
    dice = rng.random()
    if dice < 0.1:
        network.inject(rng.choice(FAULTS), rng.randrange(3))
    elif dice < 0.2:
        network.release_delayed()
        network.notice_losses()
    elif network.links and dice < 0.23:
        link = rng.choice(network.links)
        rng.choice([network.cut, network.cut_for_sender, network.cut_for_receiver])(link)


@pytest.mark.failure_edge("D aborts mid-transfer (push)")
def test_no_schedule_breaks_an_invariant(schedule: int) -> None:
    run_schedule(schedule)


def test_a_seed_is_a_history() -> None:
    histories = [run_schedule(seed) for seed in (3, 3, 4)]
    assert histories[0] == histories[1] != histories[2]
    assert len(histories[0]) > 200


def run_schedule(seed: int) -> list[str]:
    """Run one schedule to its end; the events of both sides in order, without what is drawn as a secret."""
    options = {"num_blocks": NUM_BLOCKS, "slice_bytes": 70, "layout": make_layout(num_kv_heads=1)}
    with pair("fake", config=replace(FAST, max_connect_failures=6), **options) as p:
        engines = new_engines(p, seed)
        network, rng = p.network, engines.rng
        assert network is not None
        for _ in range(120):
            engines.act()
            disturb(network, rng)
            for _ in range(rng.randrange(60)):
                network.step(rng.choice)
            if rng.random() < 0.6:
                engines.take_events()
        engines.end()
        while network.step(rng.choice):
            pass
        engines.take_events()
        check_idle(engines)
        return [describe(event) for event in (*p.received, *p.sent)]


def describe(event: MoverEvent) -> str:
    """An event without its session's random name."""
    fields = [getattr(event, name) for name in event.__slots__ if name not in ("session", "error")]
    return f"{type(event).__name__} {fields}"


@pytest.mark.failure_edge("D aborts mid-transfer (push)")
@pytest.mark.parametrize("transport", ["tcp", "shm", "pull", *ENGINES])
def test_no_race_of_real_threads_breaks_an_invariant(transport: str) -> None:
    layout = make_layout(block_size=16, num_layers=(4, 3), num_kv_heads=8)
    with pair(transport, num_blocks=NUM_BLOCKS, layout=layout) as p:
        engines = new_engines(p, seed=1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            engines.act()
            if engines.rng.random() < 0.3:
                time.sleep(engines.rng.random() * 0.001)
            engines.take_events()
        engines.end()

        def is_over() -> bool:
            engines.take_events()
            return not engines.sessions and not p.taken

        p.until(is_over)
        check_idle(engines)
        assert engines.num_complete > 20
        assert engines.num_given_up > 20
        assert p.events(BlocksAcknowledged)
