"""The ledger counts at selection, never twice what a report counts, and is empty when nothing runs."""

from hypothesis import given
from hypothesis import strategies as st

from core.ids import RequestId, WorkerId
from services.gateway.routing.ledger import RouteLedger

W1, W2 = WorkerId("w1"), WorkerId("w2")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_a_request_counts_from_its_selection_to_its_end():
    ledger = RouteLedger(Clock())
    entry = ledger.add(RequestId("a"), W1, 100)
    assert ledger.counts(W1) == (1, 100)
    assert ledger.counts(W2) == (0, 0)
    ledger.tokens_computed(entry)
    assert ledger.counts(W1) == (1, 0)
    ledger.drop(entry)
    ledger.drop(entry)
    assert ledger.counts(W1) == (0, 0)
    assert ledger.num_requests(W1) == 0


def test_what_a_later_report_counts_is_not_counted_again():
    ledger = RouteLedger(Clock())
    before = ledger.now()
    entry = ledger.add(RequestId("a"), W1, 100)
    assert ledger.counts(W1, unseen_since=before) == (1, 100)
    ledger.confirm(entry)
    after = ledger.now()
    assert ledger.counts(W1, unseen_since=before) == (1, 100)
    assert ledger.counts(W1, unseen_since=after) == (0, 0)
    assert ledger.counts(W1) == (1, 100)


def test_a_second_run_of_a_request_is_not_ended_by_the_first():
    ledger = RouteLedger(Clock())
    first = ledger.add(RequestId("a"), W1, 10)
    second = ledger.add(RequestId("a"), W1, 20)
    ledger.drop(first)
    assert ledger.counts(W1) == (1, 20)
    ledger.drop(second)
    assert ledger.counts(W1) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["add", "drop"])), max_size=60))
def test_nothing_is_left_when_all_have_ended(steps):
    ledger, live = RouteLedger(Clock()), {}
    for number, action in steps:
        if action == "add" and number not in live:
            live[number] = ledger.add(RequestId(str(number)), W1, number)
        elif action == "drop" and number in live:
            ledger.drop(live.pop(number))
        assert ledger.counts(W1) == (len(live), sum(live))
    for entry in live.values():
        ledger.drop(entry)
    assert ledger.num_requests(W1) == 0
    assert not ledger._entries
