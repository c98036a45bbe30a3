"""Runs of several blocks in one frame over tcp: written as a whole, run by run, or not at all."""

from __future__ import annotations

import time
from typing import Any

import pytest
from crc32c import crc32c

from core.errors import ChecksumMismatch
from kvtransfer.events import ReceiveFailed, RunAdmitted, SessionComplete
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.wire import Announcement
from kvtransfer.transports.runs import RunBatch
from kvtransfer.transports.tcp import inbound
from tests.kvtransfer.harness import Pair, Transfer, make_layout
from tests.kvtransfer.tcp_peers import RawPeer, raw_peer, tcp_pair

ONE_GROUP = make_layout(num_layers=(3,))


@pytest.fixture(autouse=True)
def takes_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it comes, however short: what is under test is what becomes of parts."""
    monkeypatch.setattr(inbound, "_WAKE_BYTES", 1)


def batch_of(p: Pair, transfer: Transfer, number: int = 7, **changes: Any) -> tuple[bytes, bytes]:
    """The frame and the payloads of all blocks of group 0; changes: what to falsify in the frame."""
    place = p.layout.layer_run(0, 0, 3)
    size, offset = p.layout.block_bytes, place.offset_bytes
    payloads = [
        bytes(p.source[s.block * size + offset :][: place.num_bytes]) for s in transfer.sources[0]
    ]
    entries = [
        (s.position, s.valid_slots, s.block, crc32c(payload), 0)
        for s, payload in zip(transfer.sources[0], payloads, strict=True)
    ]
    session, attempt = transfer.key
    head = Announcement(True, attempt, session, 0, 0, 0, 3, len(entries), *place, number)
    return wire.pack_runs(head._replace(**changes), entries), b"".join(payloads)


def expect_alive(p: Pair, peer: RawPeer) -> None:
    """The connection still serves another session."""
    other = p.start(num_tokens=8)
    peer.say(wire.pack_open(other.key, other.secret))
    assert peer.answer().is_accepted
    peer.say(*batch_of(p, other))
    assert peer.answer().is_accepted
    p.until(p.saw(SessionComplete(*other.key)))


@pytest.mark.parametrize("cuts", [[], [1], [50, 51, 300], list(range(40, 800, 97))])
def test_a_batch_arrives_however_it_is_cut(cuts: list[int]) -> None:
    with tcp_pair(layout=ONE_GROUP) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=22)
        before = p.poison()
        peer.open(transfer)
        frame, payload = batch_of(p, transfer)
        data = frame + payload
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            peer.say(data[start:end])
            time.sleep(0.01)  # so that pieces of the frame do not meet on the way
            arrived = max(0, end - len(frame))
            p.until(lambda n=arrived: p.receiver.counters.received_bytes_total == n)  # type: ignore[misc]
        assert peer.answer() == wire.Answer(wire.FrameKind.RUN, True, transfer.key, 7)
        assert bytes(p.destination) == p.expected(transfer, before=before)
        assert len(p.events(RunAdmitted)) == 6
        expect_alive(p, peer)


def test_a_batch_that_is_only_announced_pins_no_block() -> None:
    with tcp_pair(layout=ONE_GROUP) as p, raw_peer(p) as peer, raw_peer(p) as other:
        transfer, later = p.start(num_tokens=22), p.start(num_tokens=8)
        before = p.poison()
        peer.open(transfer)
        other.open(later)
        frame, payload = batch_of(p, transfer)
        peer.say(frame)
        other.say(*batch_of(p, later))
        assert other.answer().is_accepted  # the mover has been at the frame by then
        assert [p.life.num_writers(block) for block in transfer.blocks] == [0] * 6
        peer.say(payload)
        assert peer.answer().is_accepted
        assert bytes(p.destination) == p.expected(transfer, later, before=before)


def test_one_wrong_byte_fails_the_session_and_admits_nothing() -> None:
    with tcp_pair(layout=ONE_GROUP) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=22)
        peer.open(transfer)
        frame, payload = batch_of(p, transfer)
        peer.say(frame, payload[:300], bytes([payload[300] ^ 1]), payload[301:])
        assert not peer.answer().is_accepted
        (failed,) = p.events(ReceiveFailed)
        assert isinstance(failed, ReceiveFailed)
        assert isinstance(failed.error, ChecksumMismatch)
        assert not p.events(RunAdmitted)
        assert p.receiver.counters.checksum_errors_total == 1
        expect_alive(p, peer)


def test_what_comes_after_the_session_has_ended_goes_to_scratch() -> None:
    with tcp_pair(layout=ONE_GROUP) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=22)
        peer.open(transfer)
        frame, payload = batch_of(p, transfer)
        peer.say(frame, payload[:300])
        p.until(lambda: p.receiver.counters.received_bytes_total == 300)
        p.give_up(transfer)
        before = bytes(p.destination)
        peer.say(payload[300:])
        assert not peer.answer().is_accepted
        assert bytes(p.destination) == before
        assert not p.events(RunAdmitted)
        assert p.receiver.counters.late_runs_total == 6
        expect_alive(p, peer)


def test_a_newer_connection_takes_a_half_sent_batch_over() -> None:
    """The older one's rest, with other bytes, changes nothing; it is answered for what is there."""
    with tcp_pair(layout=ONE_GROUP) as p, raw_peer(p) as old, raw_peer(p) as new:
        transfer = p.start(num_tokens=22)
        before = p.poison()
        old.open(transfer)
        new.open(transfer)
        frame, payload = batch_of(p, transfer)
        old.say(frame, b"\0" * 300)
        p.until(lambda: p.receiver.counters.received_bytes_total == 300)
        new.say(frame, payload[:500])
        p.until(lambda: p.receiver.counters.received_bytes_total == 800)
        old.say(b"\0" * (len(payload) - 300))
        p.until(lambda: p.receiver.counters.received_bytes_total == 500 + len(payload))
        new.say(payload[500:])
        assert new.answer().is_accepted
        assert bytes(p.destination) == p.expected(transfer, before=before)
        assert p.receiver.counters.duplicate_runs_total == 6
        expect_alive(p, old)


def test_a_run_by_itself_takes_a_half_sent_batch_over() -> None:
    with tcp_pair(layout=ONE_GROUP) as p, raw_peer(p) as old, raw_peer(p) as new:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        old.open(transfer)
        new.open(transfer)
        frame, payload = batch_of(p, transfer)
        old.say(frame, b"\0" * 300)
        p.until(lambda: p.receiver.counters.received_bytes_total == 300)
        for position in (0, 1):
            new.say(new.run(p, transfer, position))
            assert new.answer().is_accepted
        old.say(b"\0" * (len(payload) - 300))
        assert old.answer().is_accepted
        assert bytes(p.destination) == p.expected(transfer, before=before)


def test_a_batch_of_which_some_is_there_brings_the_rest() -> None:
    with tcp_pair(layout=ONE_GROUP) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=22)
        before = p.poison()
        peer.open(transfer)
        peer.say(peer.run(p, transfer, 2))
        assert peer.answer().is_accepted
        peer.say(*batch_of(p, transfer))
        assert peer.answer().is_accepted
        assert bytes(p.destination) == p.expected(transfer, before=before)
        assert p.receiver.counters.duplicate_runs_total == 1
        peer.say(*batch_of(p, transfer, number=8))
        assert peer.answer() == wire.Answer(wire.FrameKind.RUN, True, transfer.key, 8)
        expect_alive(p, peer)


@pytest.mark.parametrize(
    "lie",
    [
        {"num_blocks": 0},
        {"num_blocks": wire.MAX_ENTRIES + 1},
        {"num_bytes": 1 << 40},
        {"num_bytes": 8},
        {"group": 3},
        {"num_layers": 4},
        {"rank": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_live", [True, False])
def test_a_frame_that_fits_no_plan_ends_the_connection(lie: dict[str, int], is_live: bool) -> None:
    with tcp_pair(layout=ONE_GROUP) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=22)
        before = p.poison()
        peer.open(transfer)
        if not is_live:
            p.give_up(transfer)
        peer.say(*batch_of(p, transfer, **lie))
        assert peer.is_closed()
        assert bytes(p.destination) == before
        assert p.receiver.counters.refused_connections_total == 1


def test_a_batch_that_another_one_inside_overlaps_waits_for_no_answer_but_others_do_not_care() -> (
    None
):
    """While one connection is inside a batch, runs of other blocks of the session are written."""
    with tcp_pair(layout=ONE_GROUP) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=22)
        peer.open(transfer)
        batch = RunBatch(transfer.key, 0, 0, 0, 3, p.layout.block_bytes, [0, 1], [4, 4])
        intake = p.receiver._intake  # type: ignore[attr-defined]
        blocks = intake.enter_batch(batch, object(), is_opened=True)
        assert blocks is not None
        peer.say(peer.run(p, transfer, 3))
        assert peer.answer().is_accepted
        peer.say(peer.run(p, transfer, 1), peer.run(p, transfer, 4))
        assert (
            peer.answer().number == 3
        )  # the second one went to scratch, and the batch answers for it
        intake.pause_batch(batch, blocks)
        p.give_up(transfer)
        p.assert_idle()


def test_a_sender_puts_small_runs_together() -> None:
    with tcp_pair(num_blocks=200) as p:
        transfer = p.start(num_tokens=4 * 70)
        p.push(transfer)
        p.until(p.saw(SessionComplete(*transfer.key)))
        assert bytes(p.destination) == p.expected(transfer)
        assert p.sender.counters.sent_runs_total == p.receiver.counters.admitted_runs_total
