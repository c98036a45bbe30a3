"""What is special about reading by an engine: reads that take long, fail or come too late, and what peers may say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from core.blocks import BlockState
from core.errors import ChecksumMismatch
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from kvtransfer.events import (
    BlocksAcknowledged,
    ReceiveFailed,
    RunAdmitted,
    SendFailed,
    SessionComplete,
    WriterLeft,
)
from kvtransfer.pool_memory import EPOCH_AT, EPOCH_BYTES
from kvtransfer.transports.base import COPY_SLICE_BYTES
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.patience import Patience
from kvtransfer.transports.links.wire import Announcement, Entry, RemotePool
from kvtransfer.transports.pull.engine import address_of
from kvtransfer.transports.pull.landing import spans_of
from tests.kvtransfer.harness import Pair, Transfer, pair
from tests.kvtransfer.tcp_peers import HELLO, RawPeer


class RawPullPeer(RawPeer):
    """A sender made of bytes, so that it can say anything."""

    def __init__(self, p: Pair) -> None:
        super().__init__(p)
        self.pair = p

    def greet(self, **changes: Any) -> None:
        self.say(HELLO, self.pool(**changes))
        assert wire.parse_hello(self.read(wire.FRAME_BYTES)).version == wire.PROTOCOL_VERSION

    def pool(self, **changes: Any) -> bytes:
        """A right POOL frame and description; changes: what to falsify."""
        memory = self.pair.memory
        with memoryview(memory.mapping) as whole:
            address = address_of(whole)
        name = next(
            name
            for name, pieces in self.pair.reads.memory.items()
            if (address, address + len(memory.mapping)) in pieces
        )
        name = changes.pop("description", name)
        shown = RemotePool(
            len(name), address, memory.header_bytes, self.pair.layout.block_bytes,
            self.pair.num_blocks, memory.epoch,
        )  # fmt: skip
        return wire.pack_pool(shown._replace(**changes), name)

    def announce(self, transfer: Transfer, *positions: int, **changes: Any) -> None:
        """All layers of blocks of group 0, the first one unless told otherwise; changes: what to falsify."""
        p, place = (
            self.pair,
            self.pair.layout.layer_run(0, 0, len(self.pair.layout.groups[0].layers)),
        )
        entries = []
        for source in (s for s in transfer.sources[0] if s.position in (positions or (0,))):
            start = source.block * p.layout.block_bytes + place.offset_bytes
            checksum = crc32c(p.source[start : start + place.num_bytes])
            generation = p.memory.generations[source.block]
            entry = Entry(source.position, source.valid_slots, source.block, checksum, generation)
            entries.append(
                entry._replace(**{k: v for k, v in changes.items() if k in Entry._fields})
            )
        session, attempt = transfer.key
        layers = (0, len(p.layout.groups[0].layers))
        head = Announcement(True, attempt, session, 0, 0, *layers, len(entries), *place, 7)
        head = head._replace(**{k: v for k, v in changes.items() if k in Announcement._fields})
        self.say(wire.pack_runs(head, entries))


@contextmanager
def raw_peer(p: Pair) -> Iterator[RawPullPeer]:
    peer = RawPullPeer(p)
    try:
        yield peer
    finally:
        peer.sock.close()


def begun(p: Pair, count: int = 1) -> None:
    p.until(lambda: p.reads.num_begun >= count)


# ---- a read that takes long


@pytest.mark.failure_edge("D aborts mid-transfer (push)")
def test_a_block_that_is_being_read_into_is_quarantined_until_the_read_ends() -> None:
    with pair("pull") as p:
        p.reads.is_held = True
        transfer = p.start(num_tokens=8)
        p.sender.push(*transfer.key, 0, transfer.sources[0], 0, 3)
        begun(p)
        states = p.give_up(transfer)
        inside = [d.block for d in transfer.destinations[0]]
        assert [states[block] for block in inside] == [BlockState.QUARANTINED] * 2
        assert [states[d.block] for d in transfer.destinations[1]] == [BlockState.FREE] * 2
        time.sleep(0.05)
        assert not p.received
        p.reads.is_held = False
        p.until(lambda: len(p.events(WriterLeft)) == 2)
        assert sorted(e.block for e in p.events(WriterLeft) if isinstance(e, WriterLeft)) == inside
        assert all(p.life.settle(block) for block in inside)
        p.until(lambda: len(p.events(SendFailed)) == 1)
        assert not p.events(RunAdmitted)
        p.assert_idle()


def test_others_are_served_while_a_read_is_under_way() -> None:
    with pair("pull") as p:
        held, other = p.start(num_tokens=8), p.start(num_tokens=8)
        p.reads.is_held = True
        p.push(held)
        begun(p)
        with raw_peer(p) as peer:
            peer.open(other)
            p.give_up(other)
            late = p.start(num_tokens=4)
            peer.say(wire.pack_open(late.key, late.secret))
            assert peer.answer().is_accepted
        p.reads.is_held = False
        p.push(late)
        p.until(lambda: SessionComplete(*held.key) in p.received)
        p.until(lambda: SessionComplete(*late.key) in p.received)


@pytest.mark.failure_edge("P dies mid-transfer")
def test_a_read_outlives_its_connection_and_what_comes_of_it_counts() -> None:
    with pair("pull") as p:
        p.reads.is_held = True
        transfer = p.start(num_tokens=4)
        with raw_peer(p) as peer:
            peer.open(transfer)
            peer.announce(transfer)
            begun(p)
        p.until(lambda: p.receiver.counters.connections_lost_total == 1)
        block = transfer.destinations[0][0].block
        assert p.life.num_writers(block) == 1
        with raw_peer(p) as again:
            again.open(transfer)
            again.announce(transfer)
            time.sleep(0.05)
            assert p.reads.num_begun == 1, "two read into one block"
            p.reads.is_held = False
            assert again.answer().is_accepted
        assert len(p.events(RunAdmitted)) == 1
        assert p.life.num_writers(block) == 0
        p.until(lambda: len(p.reads.left) == 2)


def test_a_receiver_stops_although_a_read_does_not_end() -> None:
    with pair("pull") as p:
        p.reads.is_held = True
        transfer = p.start(num_tokens=8)
        p.push(transfer)
        begun(p)
        states = p.give_up(transfer)
        assert BlockState.QUARANTINED in states.values()
        started_s = time.monotonic()
        p.receiver.close()
        assert time.monotonic() - started_s < 5
        p.assert_idle()


def test_more_is_announced_than_is_read_at_once() -> None:
    with pair("pull", num_blocks=200) as p:
        transfer = p.start(num_tokens=4 * 90)
        p.reads.is_held = True
        for position in range(90):
            p.push_some(transfer, position, 0, 3)
            p.push_some(transfer, position, 0, 2, group=1)
        begun(p)
        time.sleep(0.02)
        assert p.reads.num_begun == 1
        p.reads.is_held = False
        p.until(p.saw(SessionComplete(*transfer.key)))
        assert bytes(p.destination) == p.expected(transfer)


# ---- a read that fails, or is of something else


@pytest.mark.parametrize("num_failures", [1, 3])
def test_a_read_that_fails_ends_its_session_and_no_other(num_failures: int) -> None:
    with pair("pull") as p:
        p.reads.num_failures = num_failures
        for _ in range(num_failures):
            transfer = p.start(num_tokens=4)
            p.push_some(transfer, 0, 0, 3)
            p.until(lambda key=transfer.key: key in failed_keys(p))  # type: ignore[misc]
            assert set(p.give_up(transfer).values()) == {BlockState.FREE}
        assert not p.events(RunAdmitted)
        assert p.reads.left == p.reads.met  # the engine meets the peer anew each time
        other = p.start(num_tokens=22)
        p.push(other)
        p.until(p.saw(SessionComplete(*other.key)))
        assert bytes(p.destination) == p.expected(other)
        assert len(p.reads.met) == num_failures + 1
        assert p.receiver.counters.connections_lost_total == 0
        p.until(lambda: len(p.events(BlocksAcknowledged)) == len(other.blocks))
        p.assert_idle()


def test_what_is_announced_behind_a_read_that_fails_is_refused_unread() -> None:
    """So nothing of the session is inside its blocks when another transport brings it."""
    with pair("pull") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=12)
        peer.greet()
        peer.say(wire.pack_open(transfer.key, transfer.secret))
        assert peer.answer().is_accepted
        p.reads.is_held, p.reads.num_failures = True, 1
        peer.announce(transfer, 0)
        begun(p)
        peer.announce(transfer, 1)
        peer.announce(transfer, 2)
        p.reads.is_held = False
        assert [peer.answer().is_accepted for _ in range(3)] == [False] * 3
        assert p.reads.num_begun == 1
        assert not p.events(RunAdmitted)
        assert set(p.give_up(transfer).values()) == {BlockState.FREE}


def failed_keys(p: Pair) -> list[tuple[int, int]]:
    return [(e.session, e.attempt) for e in p.events(SendFailed) if isinstance(e, SendFailed)]


@pytest.mark.parametrize("number", [1, 2])
def test_a_block_that_is_used_anew_while_it_is_read_is_a_miss(number: int) -> None:
    """Before its bytes are read, and after that but before its generation is."""
    with pair("pull") as p:
        transfer = p.start(num_tokens=12)
        used_anew = transfer.sources[0][1].block

        def use_anew(read: int) -> None:
            if read == number:
                p.memory.generations[used_anew] += 1
                start = used_anew * p.layout.block_bytes
                p.source[start : start + 16] = b"\x77" * 16

        p.reads.before_read = use_anew
        p.sender.push(*transfer.key, 0, transfer.sources[0], 0, 3)
        p.until(lambda: len(p.events(SendFailed)) == 1)
        admitted = [e.position for e in p.events(RunAdmitted) if isinstance(e, RunAdmitted)]
        assert admitted == [0, 2]
        assert not p.events(ReceiveFailed)
        assert p.receiver.counters.late_runs_total == 1


def test_a_pool_that_its_owner_has_closed_is_a_miss() -> None:
    with pair("pull") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        p.memory.mapping[EPOCH_AT : EPOCH_AT + EPOCH_BYTES] = bytes(EPOCH_BYTES)
        peer.announce(transfer, 0, 1)
        assert not peer.answer().is_accepted
        assert not p.events(RunAdmitted)


def test_turned_bytes_fail_the_session() -> None:
    with pair("pull") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        peer.announce(transfer, 0, 1, checksum=5)
        assert not peer.answer().is_accepted
        (failed,) = p.events(ReceiveFailed)
        assert isinstance(failed, ReceiveFailed)
        assert isinstance(failed.error, ChecksumMismatch)
        assert not p.events(RunAdmitted)


def test_more_than_a_slice_at_once_is_taken_run_by_run() -> None:
    """D holds to its own limit, whatever a peer announces."""
    layout = KVLayout(
        16, (KVGroup(GroupKind.FULL_ATTENTION, (0,), 8, SlotFormat.of("float32", 256)),)
    )
    assert 20 * layout.block_bytes > COPY_SLICE_BYTES
    with pair("pull", layout=layout) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=16 * 20)
        peer.open(transfer)
        peer.announce(transfer, *range(20))
        assert peer.answer().is_accepted
        assert bytes(p.destination) == p.expected(transfer)
        assert p.reads.num_begun == 40


def test_a_block_larger_than_a_slice_is_read_into_its_place() -> None:
    layout = KVLayout(
        16, (KVGroup(GroupKind.FULL_ATTENTION, tuple(range(20)), 8, SlotFormat.of("float32", 256)),)
    )
    assert layout.block_bytes > COPY_SLICE_BYTES
    with pair("pull", layout=layout, num_blocks=4) as p:
        transfer = p.start(num_tokens=32)
        p.push(transfer, layers_per_range=20)
        p.until(p.saw(SessionComplete(*transfer.key)))
        assert bytes(p.destination) == p.expected(transfer)
        assert p.reads.num_begun == 4


# ---- what peers may say


def test_what_a_stranger_says_of_itself_is_not_looked_at() -> None:
    with pair("pull") as p, raw_peer(p) as peer:
        transfer = p.transfer(num_tokens=8)
        peer.greet()
        peer.announce(transfer)
        assert peer.is_closed()
        assert p.reads.met == []
        assert p.receiver.counters.refused_connections_total == 1


def test_a_description_that_means_nothing_here_ends_the_session() -> None:
    with pair("pull") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.greet(description=b"no such end")
        peer.say(wire.pack_open(transfer.key, transfer.secret))
        assert peer.answer().is_accepted
        peer.announce(transfer)
        assert not peer.answer().is_accepted
        assert set(p.give_up(transfer).values()) == {BlockState.FREE}


@pytest.mark.parametrize(
    "lie",
    [
        {"address": (1 << 64) - 1},
        {"num_blocks": 1 << 63},
        {"header_bytes": 64},
        {"epoch": bytes(EPOCH_BYTES)},
    ],
    ids=str,
)
def test_a_pool_that_cannot_be_ends_the_connection(lie: dict[str, Any]) -> None:
    with pair("pull") as p, raw_peer(p) as peer:
        peer.say(HELLO, peer.pool(**lie))
        assert peer.read(wire.FRAME_BYTES + 1)[wire.FRAME_BYTES :] == b""
        assert p.receiver.counters.refused_connections_total == 1


def test_a_pool_is_shown_once_and_in_few_words() -> None:
    with pair("pull") as p:
        for tail in (b"", RemotePool(wire.MAX_DESCRIPTION_BYTES + 1, 0, 0, 0, 0, b"")):
            with raw_peer(p) as peer:
                peer.say(HELLO)
                if tail:
                    frame = bytearray(wire.pack_pool(tail._replace(description_bytes=0), b""))
                    frame[4:8] = tail.description_bytes.to_bytes(4, "little")
                    peer.say(bytes(frame))
                else:
                    peer.say(peer.pool(), peer.pool())
                assert peer.read(wire.FRAME_BYTES + 1)[wire.FRAME_BYTES :] == b""
        p.until(lambda: p.receiver.counters.refused_connections_total == 2)


def test_runs_before_a_pool_end_the_connection() -> None:
    with pair("pull") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.say(HELLO, wire.pack_open(transfer.key, transfer.secret))
        peer.read(wire.FRAME_BYTES)
        assert peer.answer().is_accepted
        peer.announce(transfer)
        assert peer.is_closed()


@pytest.mark.parametrize(
    "lie",
    [
        {"block": 64},
        {"offset_bytes": 1 << 40},
        {"num_bytes": 1 << 40},
        {"num_bytes": 8},
        {"num_blocks": 0},
        {"num_blocks": wire.MAX_ENTRIES + 1},
        {"group": 9},
        {"num_layers": 4},
        {"rank": 1},
        {"valid_slots": 5},
    ],
    ids=str,
)
def test_an_announcement_that_fits_no_pool_ends_the_connection(lie: dict[str, int]) -> None:
    with pair("pull") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        peer.open(transfer)
        peer.announce(transfer, **lie)
        assert peer.is_closed()
        assert bytes(p.destination) == before
        assert not p.events(RunAdmitted)
        assert set(p.give_up(transfer).values()) == {BlockState.FREE}


def test_an_address_that_is_not_the_peers_is_not_read() -> None:
    with pair("pull") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        peer.greet(address=4096)
        peer.say(wire.pack_open(transfer.key, transfer.secret))
        assert peer.answer().is_accepted
        peer.announce(transfer)
        assert not peer.answer().is_accepted
        assert bytes(p.destination) == before
        assert set(p.give_up(transfer).values()) == {BlockState.FREE}


# ---- the parts


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=wire.MAX_ENTRIES))
def test_spans_hold_all_blocks_and_few_others(blocks: list[int]) -> None:
    spans = spans_of(blocks)
    held = [block for first, end in spans for block in range(first, end)]
    assert set(blocks) <= set(held)
    assert held == sorted(set(held))
    assert len(held) <= 8 * len(set(blocks))
    assert all(later[0] - earlier[1] >= 8 for earlier, later in pairwise(spans))


def test_patience_grows_until_something_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    patience = Patience()
    waits = [patience.wait_s() for _ in range(9)]
    assert slept == pytest.approx([20e-6, 40e-6, 80e-6, 160e-6, 320e-6, 640e-6])
    assert waits == pytest.approx([0.0] * 6 + [1.28e-3, 2e-3, 2e-3])
    patience.renew()
    assert patience.wait_s() == 0.0
    assert slept[-1] == pytest.approx(20e-6)
