"""Sessions of two ranks a side: what one rank has, the worker does not yet have."""

from __future__ import annotations

import pytest

from core.blocks import BlockState
from core.errors import ChecksumMismatch
from core.ids import SessionId
from kvtransfer.events import ReceiveFailed, RunAdmitted, SessionComplete
from kvtransfer.rank_join import RankJoin
from kvtransfer.transports.fake.packets import Fault
from tests.kvtransfer.rank_pools import PlannedPair, make_layout, planned_pair

RANKS = {"tensor_ranks": 2}


class Joined:
    """What D's engine hears of all its ranks together, in the order in which they happened."""

    def __init__(self, pair: PlannedPair) -> None:
        self.join = RankJoin(pair.destination)
        self.heard: list[object] = []
        self._pair = pair
        self._num_taken = [0] * len(pair.receivers)

    def take(self, rank: int) -> None:
        """What a rank has said since."""
        heard = self._pair.receivers[rank].heard
        for event in heard[self._num_taken[rank] :]:
            assert isinstance(event, RunAdmitted | SessionComplete | ReceiveFailed)
            if (joined := self.join.hear(event)) is not None:
                self.heard.append(joined)
        self._num_taken[rank] = len(heard)

    def take_all(self) -> None:
        for rank in range(len(self._num_taken)):
            self.take(rank)

    @property
    def num_whole_blocks(self) -> int:
        """Leading blocks of the full-attention group that D may count on."""
        whole = {e.position for e in self.whole_blocks if e.group == 0}
        return next(position for position in range(1000) if position not in whole)

    @property
    def whole_blocks(self) -> list[RunAdmitted]:
        """Blocks that are whole on every rank that holds some of them."""
        return [e for e in self.heard if isinstance(e, RunAdmitted) and e.is_block_whole]


@pytest.mark.failure_edge("TP ranks disagree")
def test_the_worker_has_the_shorter_of_two_prefixes_and_is_not_complete() -> None:
    """One rank of P has brought its half of everything, the other of the first blocks only."""
    with planned_pair("fake", make_layout(**RANKS), make_layout(**RANKS), 20) as pair:
        assert pair.network is not None
        joined = Joined(pair)
        pair.expect()
        joined.join.expect(pair.key)
        pair.open()
        pair.push(0)
        pair.network.run()
        joined.take_all()
        assert pair.complete_ranks == [0]
        assert joined.heard
        assert joined.whole_blocks == [], "nothing is whole on both"
        pair.push(1, layers_per_range=3)
        while joined.num_whole_blocks < 2:
            assert pair.network.step()
            joined.take_all()
        assert not any(isinstance(event, SessionComplete) for event in joined.heard)

        pair.network.remove_sender(pair.senders[1].end)  # dies between two blocks
        pair.network.run()
        joined.take_all()
        assert joined.num_whole_blocks == 2
        assert not any(isinstance(event, SessionComplete) for event in joined.heard)
        joined.join.forget(pair.key)
        assert set(pair.give_up()) == {BlockState.FREE}
        assert not joined.join._sessions


@pytest.mark.failure_edge("TP ranks disagree")
def test_one_rank_that_fails_fails_the_worker_once_and_the_next_attempt_is_right() -> None:
    with planned_pair("fake", make_layout(6, **RANKS), make_layout(4, **RANKS), 22) as pair:
        assert pair.network is not None
        joined = Joined(pair)
        pair.expect()
        joined.join.expect(pair.key)
        pair.open()
        pair.push(0)
        pair.network.run()
        pair.network.inject(Fault.CORRUPT, 3)
        pair.push(1)
        pair.network.run()
        joined.take_all()
        (failure,) = [event for event in joined.heard if isinstance(event, ReceiveFailed)]
        assert isinstance(failure.error, ChecksumMismatch)
        assert joined.heard[-1] is failure
        assert not any(isinstance(event, SessionComplete) for event in joined.heard)

        joined.join.forget(pair.key)
        assert set(pair.give_up()) == {BlockState.FREE}
        for sender in pair.senders:
            sender.end.close_session(*pair.key)
        pair.key = (SessionId(7), 2)
        pair.expect()
        joined.join.expect(pair.key)
        pair.open()
        pair.push_all()
        pair.network.run()
        joined.take_all()
        assert joined.heard[-1] == SessionComplete(*pair.key)
        assert joined.heard.count(SessionComplete(*pair.key)) == 1
        pair.assert_arrived()
        pair.assert_idle()


def test_what_comes_of_a_session_that_is_not_known_says_nothing() -> None:
    join = RankJoin(make_layout(**RANKS))
    events = [
        RunAdmitted(SessionId(1), 0, 0, 0, 0, 3, True),
        SessionComplete(SessionId(1), 0),
        ReceiveFailed(SessionId(1), 0, ChecksumMismatch("wrong")),
    ]
    assert [join.hear(event) for event in events] == [None] * 3  # type: ignore[arg-type]


def test_two_ranks_that_fail_are_one_failure() -> None:
    join, failed = (
        RankJoin(make_layout(**RANKS)),
        ReceiveFailed(SessionId(1), 0, ChecksumMismatch("wrong")),
    )
    join.expect((SessionId(1), 0))
    assert [join.hear(failed), join.hear(failed)] == [failed, None]
    assert join.hear(SessionComplete(SessionId(1), 0)) is None


def test_a_block_is_whole_without_the_stages_that_hold_none_of_its_group() -> None:
    """Three stages: the windowed group's layers all lie on the last one."""
    with planned_pair("fake", make_layout(), make_layout(pipeline_ranks=3), 9) as pair:
        joined = Joined(pair)
        pair.expect()
        joined.join.expect(pair.key)
        pair.open()
        pair.push_all()
        pair.until(lambda: pair.is_complete)
        joined.take_all()
        holders = [
            [rank for rank in range(3) if pair.destination.rank_share(group, rank).layers]
            for group in (0, 1)
        ]
        assert [len(ranks) for ranks in holders] != [3, 3]
        found = sorted((e.group, e.position) for e in joined.whole_blocks)
        assert found == [(group, position) for group in (0, 1) for position in range(3)]
        assert joined.heard[-1] == SessionComplete(*pair.key)
