"""Sessions between workers that keep KV in other blocks, formats and ranks, over each transport that carries plans."""

from __future__ import annotations

from typing import Any

import pytest

from core.blocks import BlockState
from core.errors import ChecksumMismatch, LayoutMismatch
from kvtransfer.events import (
    BlocksAcknowledged,
    MoverEvent,
    ReceiveFailed,
    RunAdmitted,
    SendFailed,
    SessionComplete,
    SessionDrained,
)
from kvtransfer.transports.fake.packets import Fault
from kvtransfer.transports.runs import RunHeader
from tests.kvtransfer.rank_pools import PlannedPair, make_layout, planned_pair

TRANSPORTS = ("tcp", "fake")
both = pytest.mark.parametrize("transport", TRANSPORTS)

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "larger blocks": ({"block_size": 4}, {"block_size": 12}),
    "smaller blocks": ({"block_size": 12}, {"block_size": 4}),
    "blocks that never meet": ({"block_size": 6}, {"block_size": 4}),
    "more tensor ranks": ({}, {"tensor_ranks": 2}),
    "fewer tensor ranks": ({"tensor_ranks": 4}, {"tensor_ranks": 2}),
    "equal ranks": ({"tensor_ranks": 2}, {"tensor_ranks": 2}),
    "copied heads": ({"tensor_ranks": 8}, {"tensor_ranks": 2}),
    "stages": ({"pipeline_ranks": 2}, {"pipeline_ranks": 3}),
    "stages for ranks": ({"pipeline_ranks": 2}, {"tensor_ranks": 2, "block_size": 8}),
    "int8 on the wire": ({}, {"wire_dtype": "int8_per_token_head"}),
    "fp8 on the wire": (
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "wire_dtype": "fp8_per_token_head"},
    ),
    "a narrower pool": ({"dtype": "float32"}, {"dtype": "bfloat16", "wire_dtype": "bfloat16"}),
    "all at once": (
        {"block_size": 6, "tensor_ranks": 2},
        {
            "block_size": 4,
            "pipeline_ranks": 2,
            "dtype": "fp8_e4m3",
            "wire_dtype": "int8_per_token_head",
        },
    ),
}


def layouts(name: str) -> tuple[Any, Any]:
    source, destination = LAYOUTS[name]
    return make_layout(**source), make_layout(**destination)


def start(pair: PlannedPair) -> None:
    pair.expect()
    pair.open()


def finish(pair: PlannedPair) -> None:
    pair.until(lambda: pair.is_complete)
    num_acknowledged = sum(
        len(pair.source_tables[0][first_block(pair) :]) for _ in pair.source.groups
    )
    for rank in {p.source_rank for p in pair.plan.pairs}:
        held = [
            group
            for group in range(len(pair.source.groups))
            if pair.source.rank_share(group, rank).layers
        ]
        wanted = num_acknowledged // len(pair.source.groups) * len(held)
        heard = pair.senders[rank].heard
        pair.until(lambda heard=heard, wanted=wanted: num_acknowledged_in(heard) == wanted)


def num_acknowledged_in(heard: list[MoverEvent]) -> int:
    return sum(len(e.positions) for e in heard if isinstance(e, BlocksAcknowledged))


def first_block(pair: PlannedPair) -> int:
    return pair.first_token // pair.source.block_size


@both
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("num_tokens", "first_token"), [(22, 0), (25, 12), (24, 0)])
def test_every_byte_arrives_where_the_receiver_keeps_it(
    transport: str, name: str, num_tokens: int, first_token: int
) -> None:
    source, destination = layouts(name)
    first_token = first_token // destination.block_size * destination.block_size
    with planned_pair(transport, source, destination, num_tokens, first_token=first_token) as pair:
        start(pair)
        pair.push_all()
        finish(pair)
        pair.assert_arrived()
        pair.assert_idle()
        for rank in pair.receivers:
            assert rank.heard.count(SessionComplete(*pair.key)) == 1


@both
def test_no_rank_is_complete_before_all_that_give_it_something_have(transport: str) -> None:
    """Two ranks of P, two of D: the one whose giver is silent waits, the other does not."""
    with planned_pair(
        transport, make_layout(tensor_ranks=2), make_layout(tensor_ranks=2), 9
    ) as pair:
        start(pair)
        pair.push(0)
        pair.until(lambda: pair.complete_ranks == [0])
        assert not any(isinstance(event, RunAdmitted) for event in pair.receivers[1].heard)
        pair.push(1)
        finish(pair)
        pair.assert_arrived()


@both
def test_a_block_is_whole_when_both_givers_have_brought_their_heads(transport: str) -> None:
    with planned_pair(transport, make_layout(tensor_ranks=2), make_layout(), 4) as pair:
        start(pair)
        (rank,) = pair.receivers
        pair.push(0, layers_per_range=3)
        pair.until(lambda: len(rank.heard) == 2)
        assert not any(
            event.is_block_whole for event in rank.heard if isinstance(event, RunAdmitted)
        )
        pair.push(1, layers_per_range=3)
        finish(pair)
        whole = [
            event.group
            for event in rank.heard
            if isinstance(event, RunAdmitted) and event.is_block_whole
        ]
        assert sorted(whole) == [0, 1]
        pair.assert_arrived()


@both
def test_what_a_sender_counts_is_what_goes_over_the_wire(transport: str) -> None:
    destination = make_layout(6, wire_dtype="int8_per_token_head")
    with planned_pair(transport, make_layout(4), destination, 13) as pair:
        start(pair)
        pair.push_all()
        finish(pair)
        slot_bytes = destination.wire_slot(0).slot_bytes
        num_bytes = 13 * 5 * 4 * slot_bytes  # tokens, layers, heads
        counters = pair.senders[0].end.counters
        assert counters.pushed_bytes_total == counters.settled_bytes_total == num_bytes
        assert (
            counters.sent_bytes_total
            == pair.receivers[0].end.counters.received_bytes_total
            == num_bytes
        )


@both
def test_a_session_that_is_given_up_writes_no_more_and_drains(transport: str) -> None:
    with planned_pair(transport, make_layout(6, tensor_ranks=2), make_layout(4), 22) as pair:
        start(pair)
        pair.push(0)
        (rank,) = pair.receivers
        pair.until(lambda: any(isinstance(event, RunAdmitted) for event in rank.heard))
        states = pair.give_up()
        assert set(states) == {BlockState.FREE}
        before = rank.pool.copy()
        pair.push(1)
        pair.until(lambda: any(isinstance(event, SendFailed) for event in pair.senders[1].heard))
        assert (rank.pool == before).all()
        for sender in pair.senders:
            sender.end.close_session(*pair.key)
        pair.until(lambda: all(SessionDrained(*pair.key) in s.heard for s in pair.senders))
        pair.assert_idle()


@both
def test_a_block_that_the_receiver_holds_already_is_acknowledged_unsent(transport: str) -> None:
    """P's block of 12 tokens ends inside what D lacks; the one before it lies wholly in what D holds."""
    with planned_pair(transport, make_layout(4), make_layout(12), 30, first_token=24) as pair:
        pair.expect()
        pair.open()
        pair.first_token = 0  # P pushes from the beginning
        pair.push_all()
        pair.until(lambda: pair.is_complete)
        pair.until(lambda: num_acknowledged_in(pair.senders[0].heard) == 2 * 8)
        assert pair.senders[0].end.counters.sent_bytes_total == 6 * 5 * 4 * 32
        pair.first_token = 24
        pair.assert_arrived()


# ---------------------------------------------------------------- faults, over fake


def test_a_cut_connection_brings_everything_once() -> None:
    with planned_pair("fake", make_layout(6, tensor_ranks=2), make_layout(4), 22) as pair:
        assert pair.network is not None
        start(pair)
        for at_run in (1, 4, 9):
            pair.network.inject(Fault.CUT, at_run)
        pair.push_all()
        finish(pair)
        pair.assert_arrived()
        admitted = [event for event in pair.receivers[0].heard if isinstance(event, RunAdmitted)]
        assert pair.receivers[0].end.counters.admitted_runs_total == len(admitted)
        pair.assert_idle()


@pytest.mark.parametrize("fault", [Fault.DUPLICATE, Fault.REORDER, Fault.DELAY])
def test_runs_come_in_any_order_and_twice(fault: Fault) -> None:
    with planned_pair("fake", make_layout(6), make_layout(4, tensor_ranks=2), 22) as pair:
        assert pair.network is not None
        start(pair)
        for at_run in range(0, 20, 3):
            pair.network.inject(fault, at_run)
        pair.push_all()
        pair.network.run()
        pair.network.release_delayed()
        finish(pair)
        pair.assert_arrived()
        pair.assert_idle()


def test_a_corrupt_run_fails_the_session_and_writes_nothing() -> None:
    """What is on its way behind it is drained, and the connection stands for the sessions that share it."""
    with planned_pair("fake", make_layout(6), make_layout(4), 22) as pair:
        assert pair.network is not None
        start(pair)
        pair.network.inject(Fault.CORRUPT)
        pair.push_all()
        pair.network.run()
        (failure,) = [e for e in pair.receivers[0].heard if isinstance(e, ReceiveFailed)]
        assert isinstance(failure.error, ChecksumMismatch)
        assert not any(isinstance(event, RunAdmitted) for event in pair.receivers[0].heard)
        assert (pair.receivers[0].pool == 0xEE).all()
        assert pair.receivers[0].end.counters.refused_connections_total == 0
        assert len(pair.network.links) == 1


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"rank": 2}, "rank 2 has nothing for rank 0"),
        ({"group": 2}, "no piece"),
        ({"position": 9}, "no piece"),
        ({"first_layer": 3}, "no piece"),
        ({"num_layers": 0}, "no piece"),
        ({"valid_slots": 0}, "no piece"),
        ({"first_slot": 1}, "by its plan they are 384"),
        ({"num_bytes": 1 << 40}, "by its plan they are 512"),
    ],
)
def test_a_header_that_fits_no_plan_fails_its_session(lie: dict[str, int], message: str) -> None:
    with planned_pair("fake", make_layout(8, tensor_ranks=2), make_layout(4), 8) as pair:
        pair.expect()
        (rank,) = pair.receivers
        header = RunHeader(*pair.key, 1, 0, 0, 0, 2, 4, 512, 0, 1, 0)
        run = rank.end.intake.begin(header, is_opened=True)  # such a one is taken
        rank.end.intake.abandon(run)
        with pytest.raises(LayoutMismatch, match=message):
            rank.end.intake.begin(header._replace(**lie), is_opened=True)
        (failure,) = rank.heard
        assert isinstance(failure, ReceiveFailed)


def test_a_writer_that_loses_its_permit_while_it_puts_bytes_in_place_is_late() -> None:
    """D gives up between the last byte of a run and its place in the pool: nothing is written, P hears no."""
    with planned_pair("fake", make_layout(6), make_layout(4), 6) as pair:
        assert pair.network is not None
        start(pair)
        pair.push_all()
        (rank,) = pair.receivers
        while not any(link.is_inside_slice for link in pair.network.links):
            assert pair.network.step()
        pair.give_up()
        pair.network.run()
        assert (rank.pool == 0xEE).all()
        assert any(isinstance(event, SendFailed) for event in pair.senders[0].heard)
        assert rank.end.counters.late_runs_total > 0
