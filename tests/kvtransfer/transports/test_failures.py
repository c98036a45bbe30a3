"""What only a scripted transport can show: faults at a chosen moment, a writer held inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from core.blocks import BlockState
from core.errors import ChecksumMismatch, PeerLost
from core.ids import BlockId
from kvtransfer.events import (
    BlocksAcknowledged,
    ReceiveFailed,
    RunAdmitted,
    SendFailed,
    SessionComplete,
    WriterLeft,
)
from kvtransfer.transports.fake.ends import FakeReceiver, FakeSender
from kvtransfer.transports.fake.link import FakeLink
from kvtransfer.transports.fake.network import FakeNetwork
from kvtransfer.transports.fake.packets import Fault
from tests.kvtransfer.harness import FAST, Pair, Transfer, pair


@contextmanager
def fake_pair(**options: object) -> Iterator[tuple[Pair, FakeNetwork]]:
    with pair("fake", **options) as p:
        assert p.network is not None
        yield p, p.network


def until_inside(network: FakeNetwork, link_index: int = -1) -> FakeLink:
    """Go on until a writer stands inside a slice of the newest connection."""
    while network.step():
        if network.links and network.links[link_index].is_inside_slice:
            return network.links[link_index]
    raise AssertionError("no writer ever went inside")


def send_all(network: FakeNetwork) -> FakeLink:
    """Let the senders put all they have on their way; the newest connection."""
    while any(lane.has_runs() for s in network.senders for lane in s.outbox.lanes.values()):
        network.step()
    return network.links[-1]


def assert_complete(p: Pair, *transfers: Transfer, before: bytes | None = None) -> None:
    for transfer in transfers:
        assert p.received.count(SessionComplete(*transfer.key)) == 1
    assert bytes(p.destination) == p.expected(*transfers, before=before)
    p.assert_idle()


# ---- a writer inside


@pytest.mark.failure_edge("D aborts mid-transfer (push)")
def test_a_block_with_a_writer_inside_is_quarantined_until_it_leaves() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=8)
        p.push(transfer)
        until_inside(network)
        block = transfer.destinations[0][0].block
        states = p.give_up(transfer)
        assert states[block] is BlockState.QUARANTINED
        assert [s for b, s in states.items() if b != block] == [BlockState.FREE] * 3
        assert not p.life.settle(block), "settled with a writer inside"
        assert not p.received
        network.run()
        assert p.received == [WriterLeft(block)]
        assert p.life.settle(block)
        assert len(p.events(SendFailed)) == 1
        p.assert_idle()


@pytest.mark.failure_edge("D aborts mid-transfer (push)")
def test_after_an_abort_one_slice_may_end_and_none_begins() -> None:
    with fake_pair(slice_bytes=16) as (p, network):
        transfer = p.start(num_tokens=4)
        p.push_some(transfer, 0, 0, 3)
        until_inside(network)
        before = p.poison()
        p.give_up(transfer)
        network.run()
        changed = [i for i, (a, b) in enumerate(zip(before, p.destination, strict=True)) if a != b]
        start = transfer.destinations[0][0].block * p.layout.block_bytes
        assert all(start <= place < start + 16 for place in changed)


def test_forgetting_alone_ends_the_writing_of_a_run_that_has_begun() -> None:
    with fake_pair(slice_bytes=16) as (p, network):
        transfer = p.start(num_tokens=4)
        p.push_some(transfer, 0, 0, 3)
        until_inside(network).deliver()  # the first slice is written, the permit stays as it is
        p.receiver.forget(*transfer.key)
        before = p.poison()
        network.run()
        assert bytes(p.destination) == before
        assert not p.received


def test_nothing_is_admitted_after_forgetting_although_the_last_slice_was_inside() -> None:
    with fake_pair(slice_bytes=1 << 16) as (p, network):
        transfer = p.start(num_tokens=4)
        p.push(transfer)
        until_inside(network)
        p.receiver.forget(*transfer.key)
        network.run()
        assert not p.received
        assert p.receiver.counters.admitted_runs_total == 0


@pytest.mark.failure_edge("P dies mid-transfer")
def test_a_writer_whose_connection_is_lost_leaves() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=8)
        p.push(transfer)
        link = until_inside(network)
        block = transfer.destinations[0][0].block
        assert p.life.num_writers(block) == 1
        p.give_up(transfer)
        network.cut_for_receiver(link)
        assert p.received == [WriterLeft(block)]
        assert p.life.settle(block)


@pytest.mark.failure_edge("P dies mid-transfer")
def test_a_half_received_run_counts_for_nothing() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=4)
        network.inject(Fault.CUT)
        p.push_some(transfer, 0, 0, 3)
        while not network.links:
            network.step()
        link = network.links[0]
        while network.links == [link]:
            assert network.step()
        p.sender.close()
        network.run()
        assert not p.received
        assert set(p.give_up(transfer).values()) == {BlockState.FREE}


# ---- lost, doubled, late, out of order


@pytest.mark.parametrize("at_run", [0, 1, 3, 6])
def test_a_cut_connection_is_made_again_and_the_rest_is_sent(at_run: int) -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=14)
        network.inject(Fault.CUT, at_run)
        p.push(transfer)
        network.run()
        assert_complete(p, transfer)
        assert p.sender.counters.connections_lost_total == 1
        assert len(p.events(BlocksAcknowledged)) == len(transfer.blocks)
        assert not p.events(SendFailed)


@pytest.mark.failure_edge("a run doubled after a reconnect")
def test_a_run_doubled_after_a_reconnect_is_written_once() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=4)
        p.push_some(transfer, 0, 0, 3)
        while not p.events(RunAdmitted):
            network.step()
        network.cut(network.links[0])  # D has it, but its answer is lost
        before = p.poison()
        network.run()
        assert bytes(p.destination) == before
        assert p.receiver.counters.duplicate_runs_total == 1
        assert len(p.events(RunAdmitted)) == 1
        assert len(p.events(BlocksAcknowledged)) == 1


@pytest.mark.failure_edge("completion twice / late / never")
def test_a_doubled_run_completes_once() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=4)
        for run in range(3):
            network.inject(Fault.DUPLICATE, run)
        p.push(transfer)
        network.run()
        assert_complete(p, transfer)
        assert p.receiver.counters.duplicate_runs_total == 3


@pytest.mark.failure_edge("completion twice / late / never")
@pytest.mark.failure_edge("a late copy of the tail block after decode wrote to it")
def test_a_run_that_comes_after_completion_and_decode_is_not_written() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=6)
        tail = transfer.destinations[0][-1]
        assert tail.valid_slots == 2
        network.inject(Fault.DELAY)
        p.push_some(transfer, tail.position, 0, 3)
        network.run()
        p.push_some(transfer, tail.position, 0, 3)  # the copy that is in time
        p.push_some(transfer, 0, 0, 3)
        p.sender.push(*transfer.key, 1, transfer.sources[1], 0, 2)
        network.run()
        assert p.events(SessionComplete)
        p.receiver.forget(*transfer.key)
        p.life.revoke(transfer.permit)
        start = tail.block * p.layout.block_bytes
        p.destination[start : start + p.layout.block_bytes] = b"\x11" * p.layout.block_bytes
        after_decode = bytes(p.destination)
        network.release_delayed()
        network.run()
        assert bytes(p.destination) == after_decode
        assert p.receiver.counters.late_runs_total == 1


def test_a_late_copy_is_not_written_even_before_the_engine_has_seen_the_completion() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=4)
        network.inject(Fault.DELAY)
        p.push_some(transfer, 0, 0, 3)
        network.run()
        p.push(transfer)
        network.run()
        before = p.poison()
        network.release_delayed()
        network.run()
        assert bytes(p.destination) == before


@pytest.mark.failure_edge("completion twice / late / never")
def test_a_lost_run_completes_nothing_and_its_end_is_the_engines() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=4)
        network.inject(Fault.DROP)
        p.push(transfer)
        network.run()
        assert not p.events(SessionComplete)
        assert p.sender.counters.blocks_outstanding == 1
        assert set(p.give_up(transfer).values()) == {BlockState.FREE}
        p.sender.close_session(*transfer.key)
        p.assert_idle()


def test_order_does_not_matter() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=16)
        for run in range(1, 10, 2):
            network.inject(Fault.REORDER, run)
        p.push(transfer)
        network.run()
        positions = [e.position for e in p.events(RunAdmitted) if isinstance(e, RunAdmitted)]
        assert positions[:4] != [0, 1, 2, 3]
        assert_complete(p, transfer)


@pytest.mark.failure_edge("P aborts mid-transfer")
def test_a_sender_that_ends_half_way_leaves_the_session_incomplete() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=8)
        p.push_some(transfer, 0, 0, 3)
        network.run()
        p.push(transfer)
        p.sender.close_session(*transfer.key)
        network.run()
        assert not p.events(SessionComplete)
        assert len(p.events(RunAdmitted)) == 1
        assert set(p.give_up(transfer).values()) == {BlockState.FREE}
        p.assert_idle()


def test_turned_bytes_fail_the_session_and_admit_nothing_more() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=8)
        other = p.start(num_tokens=8)
        network.inject(Fault.CORRUPT)
        p.push(transfer)
        p.push(other)
        network.run()
        failures = p.events(ReceiveFailed)
        assert len(failures) == 1
        assert isinstance(failures[0], ReceiveFailed)
        assert (failures[0].session, failures[0].attempt) == transfer.key
        assert isinstance(failures[0].error, ChecksumMismatch)
        assert p.receiver.counters.checksum_errors_total == 1
        admitted = p.events(RunAdmitted)
        assert all(isinstance(e, RunAdmitted) and e.session == other.session for e in admitted)
        assert SessionComplete(*other.key) in p.received
        assert len(p.events(SendFailed)) == 1


# ---- two connections, two senders


@pytest.mark.failure_edge("P dies mid-transfer")
def test_the_newer_of_two_connections_writes_and_the_older_drains() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=4)
        p.push_some(transfer, 0, 0, 3)
        old = until_inside(network)
        old.deliver()  # out of the first slice: half of the run is there
        network.cut_for_sender(old)  # half open: D does not know
        new = send_all(network)
        assert new is not old
        while not new.is_inside_slice:
            new.deliver()
        assert p.life.num_writers(transfer.destinations[0][0].block) == 1
        while old.can_deliver:
            old.deliver()
            assert p.life.num_writers(transfer.destinations[0][0].block) == 1
        assert not p.received
        network.run()
        p.sender.push(*transfer.key, 1, transfer.sources[1], 0, 2)
        network.run()
        assert_complete(p, transfer)


def test_a_copy_never_writes_while_the_first_is_inside() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=4)
        p.push_some(transfer, 0, 0, 3)
        old = until_inside(network)
        network.cut_for_sender(old)
        new = send_all(network)
        assert new is not old
        while new.can_deliver:
            new.deliver()
            assert p.life.num_writers(transfer.destinations[0][0].block) == 1
        assert not p.events(RunAdmitted)
        while old.can_deliver:
            old.deliver()
        assert len(p.events(RunAdmitted)) == 1
        network.run()


def test_a_copy_that_was_not_written_is_sent_again_when_the_first_is_lost() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=4)
        p.push(transfer)
        old = until_inside(network)
        network.cut_for_sender(old)
        new = send_all(network)
        while new.can_deliver:
            new.deliver()
        network.cut_for_receiver(old)
        network.run()
        assert not p.events(SessionComplete)
        network.cut(new)
        network.run()
        assert_complete(p, transfer)


@pytest.mark.failure_edge("a slow first P writes after D tried the next candidate")
def test_a_slow_first_sender_cannot_reach_the_second_attempt() -> None:
    with fake_pair() as (p, network):
        first = p.start(num_tokens=8)
        p.push(first)
        until_inside(network)
        states = p.give_up(first)
        held = [block for block, state in states.items() if state is BlockState.QUARANTINED]
        assert len(held) == 1
        second = p.transfer(num_tokens=8, session=first.session, attempt=1)
        assert set(first.blocks) & set(second.blocks), "the test needs blocks that are given anew"
        p.expect(second)
        slow = network.senders[0]
        fast = FakeSender(network, memoryview(p.source), p.layout, p.sent.append, FAST)
        p.sender = fast
        p.open(second)
        p.push(second)
        before = p.poison()
        network.run()
        while p.life.state(held[0]) is BlockState.QUARANTINED:
            assert p.life.settle(held[0])
        written = bytearray(p.expected(second, before=before))
        start = held[0] * p.layout.block_bytes  # the slice that was inside went to its end there
        written[start : start + p.layout.block_bytes] = p.destination[
            start : start + p.layout.block_bytes
        ]
        assert p.destination == written
        assert SessionComplete(*second.key) in p.received
        assert SessionComplete(*first.key) not in p.received
        slow.close()


# ---- an end that is gone


@pytest.mark.failure_edge("D dies holding P's lease")
def test_a_receiver_that_dies_fails_its_sessions_soon() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=8)
        p.push(transfer)
        until_inside(network)
        receiver = p.receiver
        assert isinstance(receiver, FakeReceiver)
        network.remove_receiver(receiver.addresses[0])
        network.run()
        failures = p.events(SendFailed)
        assert len(failures) == 1
        assert isinstance(failures[0], SendFailed)
        assert isinstance(failures[0].error, PeerLost)
        p.sender.close_session(*transfer.key)
        p.assert_idle()


@pytest.mark.failure_edge("P restarts on same address")
def test_nothing_of_a_former_life_of_the_sender_is_known() -> None:
    with fake_pair() as (p, network):
        first = p.start(num_tokens=8)
        p.push_some(first, 0, 0, 3)
        network.run()
        p.sender.close()
        p.give_up(first)
        p.sender = FakeSender(network, memoryview(p.source), p.layout, p.sent.append, FAST)
        p.open(first)  # it still believes in the old session
        second = p.start(num_tokens=8)
        before = p.poison()
        p.push(first)
        p.push(second)
        network.run()
        assert bytes(p.destination) == p.expected(second, before=before)
        failures = [e for e in p.sent if isinstance(e, SendFailed)]
        assert [(e.session, e.attempt) for e in failures] == [first.key]


@pytest.mark.failure_edge("P dies mid-transfer")
def test_what_a_dead_sender_had_sent_may_still_complete_the_session() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=4)
        p.push(transfer)
        sender = p.sender
        assert isinstance(sender, FakeSender)
        send_all(network)
        network.remove_sender(sender, is_noticed=False)
        network.run()
        assert bytes(p.destination) == p.expected(transfer)
        assert SessionComplete(*transfer.key) in p.received


def test_blocks_of_the_null_kind_are_never_touched() -> None:
    with fake_pair() as (p, network):
        transfer = p.start(num_tokens=8)
        p.push(transfer)
        network.run()
        assert p.life.generation(BlockId(0)) == 0
        assert not any(p.destination[: p.layout.block_bytes])
