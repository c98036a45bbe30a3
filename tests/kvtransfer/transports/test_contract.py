"""What every transport promises (kvtransfer/transports/base.py), over each of them."""

from __future__ import annotations

import secrets

import pytest

from core.blocks import BlockState
from core.errors import PeerLost
from core.ids import SessionId
from kvtransfer.events import (
    BlocksAcknowledged,
    ReceiveFailed,
    RunAdmitted,
    SendFailed,
    SessionComplete,
    SessionDrained,
)
from kvtransfer.session import SendSession, SourceBlock
from tests.kvtransfer.harness import TRANSPORTS, Pair, Transfer, pair

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def finish(pair: Pair, *transfers: Transfer) -> None:
    """Wait for both sides to know that the transfers are complete."""
    num_blocks = sum(len(t.blocks) for t in transfers)
    pair.until(lambda: all(SessionComplete(*t.key) in pair.received for t in transfers))
    pair.until(lambda: len(pair.events(BlocksAcknowledged)) >= num_blocks)


def test_every_byte_arrives_in_its_place_and_nowhere_else(transport: str) -> None:
    with pair(transport) as p:
        before = p.poison()
        transfer = p.start(num_tokens=22)
        p.push(transfer)
        finish(p, transfer)
        assert bytes(p.destination) == p.expected(transfer, before=before)
        p.assert_idle()


def test_events_come_once_and_counters_agree(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=9)
        p.push(transfer, layers_per_range=1)
        finish(p, transfer)
        num_runs = sum(
            len(group.layers) * len(transfer.sources[index])
            for index, group in enumerate(p.layout.groups)
        )
        num_bytes = sum(
            group.used_bytes(p.layout.block_size) * len(transfer.sources[index])
            for index, group in enumerate(p.layout.groups)
        )
        assert len(p.events(RunAdmitted)) == num_runs == len(set(p.events(RunAdmitted)))
        assert len(p.events(SessionComplete)) == 1
        assert len(set(p.events(BlocksAcknowledged))) == len(transfer.blocks)
        assert p.received[-1] == SessionComplete(*transfer.key)
        assert p.sender.counters.sent_bytes_total == num_bytes
        assert p.receiver.counters.received_bytes_total == num_bytes
        assert p.receiver.counters.admitted_runs_total == num_runs
        assert p.sender.counters.blocks_acknowledged_total == len(transfer.blocks)
        assert p.receiver.counters.late_runs_total == p.receiver.counters.duplicate_runs_total == 0


def test_complete_means_all_layers_of_all_groups(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.sender.push(*transfer.key, 0, transfer.sources[0], 0, 3)
        p.sender.push(*transfer.key, 1, transfer.sources[1], 0, 1)
        p.until(lambda: len(p.events(RunAdmitted)) == 4)
        assert not p.events(SessionComplete)
        p.until(lambda: len(p.events(BlocksAcknowledged)) == 2)
        assert p.sender.counters.blocks_outstanding == 2
        p.sender.push(*transfer.key, 1, transfer.sources[1], 1, 1)
        finish(p, transfer)


def test_only_what_is_missing_is_needed(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=21, first_missing=4)
        assert [d.valid_slots for d in transfer.destinations[0]] == [4, 1]
        p.push(transfer)
        finish(p, transfer)
        assert bytes(p.destination) == p.expected(transfer)


@pytest.mark.failure_edge("D full prefix hit")
def test_a_session_that_lacks_nothing_is_complete_at_once(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8, first_missing=2)
        assert p.received == [SessionComplete(*transfer.key)]
        p.sender.close_session(*transfer.key)
        p.until(p.saw(SessionDrained(*transfer.key)))


def test_sessions_of_one_pair_share_it(transport: str) -> None:
    with pair(transport) as p:
        transfers = [p.start(num_tokens=8) for _ in range(6)]
        for transfer in transfers:
            p.push(transfer)
        finish(p, *transfers)
        assert bytes(p.destination) == p.expected(*transfers)


@pytest.mark.failure_edge("completion twice / late / never")
def test_what_is_covered_goes_to_scratch_and_is_acknowledged(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.push(transfer)
        finish(p, transfer)
        before = p.poison()
        p.push(transfer)
        p.until(lambda: p.receiver.counters.duplicate_runs_total == 6)
        p.until(lambda: p.sender.counters.sent_runs_total == 12)
        assert bytes(p.destination) == before
        assert len(p.events(SessionComplete)) == 1
        assert len(p.events(BlocksAcknowledged)) == len(transfer.blocks)
        assert not p.events(SendFailed)


def test_a_run_that_is_covered_in_part_is_written_in_part(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=4)
        p.push_some(transfer, 0, 1, 1)
        p.until(lambda: len(p.events(RunAdmitted)) == 1)
        layer_bytes = p.layout.groups[0].layer_bytes(p.layout.block_size)
        middle = transfer.destinations[0][0].block * p.layout.block_bytes + layer_bytes
        p.destination[middle : middle + layer_bytes] = b"\xa5" * layer_bytes
        p.push_some(transfer, 0, 0, 3)
        p.push_some(transfer, 0, 0, 2, group=1)
        finish(p, transfer)
        expected = bytearray(p.expected(transfer))
        expected[middle : middle + layer_bytes] = b"\xa5" * layer_bytes
        assert p.destination == expected


def test_a_range_that_nobody_needs_is_not_written(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=16, first_missing=2)
        p.sender.push(*transfer.key, 0, [SourceBlock(0, transfer.sources[0][0].block, 4)], 0, 3)
        p.push(transfer)
        finish(p, transfer)
        assert bytes(p.destination) == p.expected(transfer)
        assert p.receiver.counters.duplicate_runs_total == 1


@pytest.mark.failure_edge("client gone after P done, before D admits")
def test_a_forgotten_session_writes_nothing_and_its_sender_stops(transport: str) -> None:
    with pair(transport) as p:
        other = p.start(num_tokens=8)
        transfer = p.start(num_tokens=8)
        p.push_some(transfer, 0, 0, 1)
        p.until(lambda: len(p.events(RunAdmitted)) == 1)
        assert set(p.give_up(transfer).values()) == {BlockState.FREE}
        before = p.poison()
        p.push(transfer)
        p.until(lambda: len(p.events(SendFailed)) == 1)
        assert p.sender.counters.blocks_outstanding == 0
        p.push(transfer)  # ignored from now on
        p.push(other)
        finish(p, other)
        assert bytes(p.destination) == p.expected(other, before=before)
        assert p.receiver.counters.late_runs_total >= 1
        assert len(p.events(SendFailed)) == 1
        assert p.receiver.counters.refused_connections_total == 0
        p.sender.close_session(*transfer.key)
        p.until(p.saw(SessionDrained(*transfer.key)))


def test_forgetting_is_idempotent_and_knows_no_strangers(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.receiver.forget(*transfer.key)
        p.receiver.forget(*transfer.key)
        p.receiver.forget(SessionId(1), 3)


def test_a_revoked_permit_alone_keeps_a_run_out(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.life.revoke(transfer.permit)
        before = p.poison()
        p.push(transfer)
        p.until(lambda: len(p.events(SendFailed)) == 1)
        assert bytes(p.destination) == before
        assert not p.events(RunAdmitted)


def test_an_old_generation_is_never_written(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=4)
        block = transfer.destinations[0][0].block
        p.life.abort(block)
        p.life.allocate(block)  # somebody else's now; the permit is live, but for the other life
        before = p.poison()
        p.push_some(transfer, 0, 0, 3)
        p.until(lambda: len(p.events(SendFailed)) == 1)
        assert bytes(p.destination) == before


def test_a_wrong_secret_gets_nowhere(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.transfer(num_tokens=8)
        p.expect(transfer)
        p.open(transfer, secret=secrets.token_bytes(32))
        before = p.poison()
        p.push(transfer)
        p.until(lambda: len(p.events(SendFailed)) == 1)
        assert p.receiver.counters.refused_connections_total >= 1
        assert bytes(p.destination) == before


def test_an_unknown_session_gets_nowhere_and_others_go_on(transport: str) -> None:
    with pair(transport) as p:
        unknown = p.transfer(num_tokens=8)
        p.open(unknown)
        transfer = p.start(num_tokens=8)
        p.push(unknown)
        p.push(transfer)
        finish(p, transfer)
        failures = p.events(SendFailed)
        assert [(e.session, e.attempt) for e in failures if isinstance(e, SendFailed)] == [
            unknown.key
        ]
        assert bytes(p.destination) == p.expected(transfer)


def test_a_late_peer_is_not_taken_for_a_stranger(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.give_up(transfer)
        p.push(transfer)
        p.until(lambda: len(p.events(SendFailed)) == 1)
        assert p.receiver.counters.refused_sessions_total == 1
        assert p.receiver.counters.refused_connections_total == 0


@pytest.mark.failure_edge("client gone before P starts")
def test_closing_drops_what_is_queued(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.sender.close_session(*transfer.key)
        p.sender.close_session(*transfer.key)
        p.push(transfer)
        p.until(p.saw(SessionDrained(*transfer.key)))
        assert p.sent == [SessionDrained(*transfer.key)]
        p.assert_idle()


def test_a_session_may_be_closed_after_it_is_complete(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.push(transfer)
        finish(p, transfer)
        p.receiver.forget(*transfer.key)
        p.sender.close_session(*transfer.key)
        p.until(p.saw(SessionDrained(*transfer.key)))
        assert p.sent[-1] == SessionDrained(*transfer.key)
        assert not p.events(SendFailed)


def test_nobody_listening_fails_the_session_once(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.receiver.close()
        p.push(transfer)
        p.until(lambda: len(p.events(SendFailed)) == 1)
        failed = p.events(SendFailed)[0]
        assert isinstance(failed, SendFailed)
        assert isinstance(failed.error, PeerLost)
        assert p.receiver.addresses[0] in failed.error.message
        p.sender.close_session(*transfer.key)
        p.until(p.saw(SessionDrained(*transfer.key)))


@pytest.mark.failure_edge("P dies before transfer")
def test_a_session_whose_sender_never_comes_costs_nothing(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.sender.close()
        assert set(p.give_up(transfer).values()) == {BlockState.FREE}
        assert not p.received


def test_an_attempt_knows_nothing_of_the_one_before(transport: str) -> None:
    with pair(transport) as p:
        first = p.start(num_tokens=8)
        p.push_some(first, 0, 0, 1)
        p.until(lambda: len(p.events(RunAdmitted)) == 1)
        p.give_up(first)
        second = p.transfer(num_tokens=8, session=first.session, attempt=1)
        p.expect(second)
        stranger = p.transfer(num_tokens=8, session=first.session, attempt=2)
        assert stranger.secret != second.secret
        p.open(second)
        before = p.poison()
        p.push(first)
        p.push(second)
        finish(p, second)
        assert bytes(p.destination) == p.expected(second, before=before)
        assert SessionComplete(*first.key) not in p.received


def test_close_gives_the_pools_back(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=8)
        p.push(transfer)
        finish(p, transfer)
        p.push(transfer)
    p.destination.append(0)  # BufferError while somebody holds a view of it


def test_close_is_idempotent_also_under_way(transport: str) -> None:
    with pair(transport) as p:
        transfer = p.start(num_tokens=64, session=SessionId(2**63 - 1))
        p.push(transfer)
        p.sender.close()
        p.sender.close()
        p.receiver.close()
        p.receiver.close()
        p.push(transfer)
        assert not p.events(ReceiveFailed)


def test_a_session_can_be_open_for_a_sender_that_has_nothing_to_send(transport: str) -> None:
    with pair(transport) as p:
        p.sender.open(SendSession(SessionId(5), 0, bytes(32), p.receiver.addresses[0]))
        p.sender.close_session(SessionId(5), 0)
        p.until(p.saw(SessionDrained(SessionId(5), 0)))
        assert p.receiver.counters.refused_connections_total == 0
