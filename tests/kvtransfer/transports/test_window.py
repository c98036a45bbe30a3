"""What of a session may be on its way at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.events import SessionComplete
from kvtransfer.transports.fake.ends import FakeSender
from kvtransfer.transports.fake.packets import Fault
from tests.kvtransfer.harness import FAST, Pair, Transfer, make_layout, pair

LAYOUT = make_layout(num_layers=(2,))
RUN_BYTES = LAYOUT.block_bytes


def unanswered(p: Pair, transfer: Transfer) -> int:
    """Bytes of a session that are on their way."""
    assert isinstance(p.sender, FakeSender)
    (part,) = p.sender.outbox.parts(transfer.key)
    return sum(run.num_bytes for run in part.unanswered.values())


@pytest.mark.parametrize(
    ("window_bytes", "most"),
    [(1, RUN_BYTES), (RUN_BYTES, RUN_BYTES), (RUN_BYTES + 1, 2 * RUN_BYTES)],
)
def test_no_more_is_on_its_way_than_the_window_and_one_run(window_bytes: int, most: int) -> None:
    with pair("fake", layout=LAYOUT, config=replace(FAST, window_bytes=window_bytes)) as p:
        assert p.network is not None
        before = p.poison()
        transfer = p.start(num_tokens=22)
        p.push(transfer)
        seen = [unanswered(p, transfer)]
        while p.network.step(lambda actions: actions[0]):  # sends go first wherever they may
            seen.append(unanswered(p, transfer))
        assert max(seen) == most
        assert seen[-1] == 0
        assert SessionComplete(*transfer.key) in p.received
        assert bytes(p.destination) == p.expected(transfer, before=before)
        p.assert_idle()


def test_a_session_whose_answers_stay_away_holds_up_no_other() -> None:
    with pair("fake", layout=LAYOUT, config=replace(FAST, window_bytes=1)) as p:
        assert p.network is not None
        slow, other = p.start(num_tokens=22), p.start(num_tokens=22)
        p.network.inject(Fault.DELAY)
        p.push(slow)
        p.push(other)
        p.network.run()
        assert SessionComplete(*other.key) in p.received
        assert SessionComplete(*slow.key) not in p.received
        assert unanswered(p, slow) == RUN_BYTES
        p.network.release_delayed()
        p.network.run()
        assert SessionComplete(*slow.key) in p.received
        p.assert_idle()


def test_a_lost_connection_opens_the_window_again() -> None:
    with pair("fake", layout=LAYOUT, config=replace(FAST, window_bytes=1)) as p:
        assert p.network is not None
        transfer = p.start(num_tokens=22)
        p.network.inject(Fault.DROP, 2)
        p.push(transfer)
        p.network.run()
        assert unanswered(p, transfer) == RUN_BYTES
        (link,) = p.network.links
        p.network.cut(link)
        p.network.run()
        assert SessionComplete(*transfer.key) in p.received
        p.assert_idle()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_every_byte_arrives_through_a_window_smaller_than_a_run(transport: str) -> None:
    with pair(transport, config=replace(FAST, window_bytes=1)) as p:
        before = p.poison()
        transfer = p.start(num_tokens=22)
        p.push(transfer)
        p.until(p.saw(SessionComplete(*transfer.key)))
        assert bytes(p.destination) == p.expected(transfer, before=before)
