"""What waits for its turn takes in what is pushed later, where runs are announcements."""

from __future__ import annotations

import pytest

from core.ids import BlockId, SessionId
from kvtransfer.counters import TransferCounters
from kvtransfer.events import BlocksAcknowledged, MoverEvent
from kvtransfer.session import SendSession, SourceBlock
from kvtransfer.transports.outbox import Outbox
from kvtransfer.transports.outgoing import Lane
from kvtransfer.transports.runs import RunAnswer
from tests.kvtransfer.harness import make_layout

LAYOUT = make_layout()
KEY = (SessionId(1), 0)
LAYERS = len(LAYOUT.groups[0].layers)


def make_outbox(*, joins_pushes: bool) -> tuple[Outbox, Lane, list[MoverEvent]]:
    events: list[MoverEvent] = []
    outbox = Outbox(
        memoryview(bytes(LAYOUT.block_bytes)), LAYOUT, events.append, TransferCounters(),
        window_bytes=1 << 30, max_run_blocks=5, max_run_bytes=1 << 20, joins_pushes=joins_pushes,
    )  # fmt: skip
    return outbox, outbox.open(SendSession(*KEY, bytes(32), "somewhere")), events


def push(outbox: Outbox, first: int, count: int, layers: tuple[int, int] = (0, LAYERS)) -> None:
    sources = tuple(SourceBlock(at, BlockId(at + 1), 4) for at in range(first, first + count))
    num_bytes = count * LAYOUT.layer_run(0, *layers).num_bytes
    outbox.push(KEY, 0, sources, layers, num_bytes)


def take_all(lane: Lane) -> list[list[int]]:
    taken = []
    while lane.has_runs():
        taken.append([source.position for source in lane.take().sources])
    return taken


def test_a_run_that_waits_carries_what_comes_later_up_to_its_limit() -> None:
    outbox, lane, _ = make_outbox(joins_pushes=True)
    for first in (0, 2, 4, 6):
        push(outbox, first, 2)
    assert take_all(lane) == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_where_bytes_go_over_the_connection_a_push_is_a_run() -> None:
    outbox, lane, _ = make_outbox(joins_pushes=False)
    for first in (0, 2):
        push(outbox, first, 2)
    assert take_all(lane) == [[0, 1], [2, 3]]


def test_other_layers_and_a_run_that_has_left_are_not_joined() -> None:
    outbox, lane, _ = make_outbox(joins_pushes=True)
    push(outbox, 0, 1, (0, 1))
    push(outbox, 1, 1, (0, 2))
    assert [source.position for source in lane.take().sources] == [0]
    push(outbox, 2, 1, (0, 1))
    assert take_all(lane) == [[1], [2]]


def test_a_run_that_is_to_be_sent_again_may_carry_more_than_before() -> None:
    outbox, lane, events = make_outbox(joins_pushes=True)
    push(outbox, 0, 2)
    before = lane.take()
    lane.requeue()  # the connection is lost
    push(outbox, 2, 2)
    again = lane.take()
    assert (again.number, [source.position for source in again.sources]) == (
        before.number, [0, 1, 2, 3],
    )  # fmt: skip
    assert again.num_bytes == 4 * LAYOUT.layer_run(0, 0, LAYERS).num_bytes
    outbox.answered(lane, KEY, RunAnswer(again.number, True), "")
    assert events == [BlocksAcknowledged(*KEY, 0, (0, 1, 2, 3))]
    assert not lane.needs_link()


@pytest.mark.parametrize("joins_pushes", [True, False])
def test_each_block_is_acknowledged_once_and_all_bytes_are_settled(joins_pushes: bool) -> None:
    outbox, lane, events = make_outbox(joins_pushes=joins_pushes)
    for first in (0, 2, 4):
        push(outbox, first, 2)
    runs = []
    while lane.has_runs():
        runs.append(lane.take())
    for run in runs:
        outbox.answered(lane, KEY, RunAnswer(run.number, True), "")
    assert all(isinstance(event, BlocksAcknowledged) for event in events)
    told = [p for e in events if isinstance(e, BlocksAcknowledged) for p in e.positions]
    assert told == [0, 1, 2, 3, 4, 5]
    counters = outbox.counters
    num_bytes = 6 * LAYOUT.layer_run(0, 0, LAYERS).num_bytes
    assert (counters.settled_bytes_total, counters.blocks_outstanding) == (num_bytes, 0)
    assert not lane.needs_link()
