"""The order of sequences under both policies."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.policy import ORDERS, PolicyQueue
from engine.sequence import Sequence
from tests.support.sequences import make_sequence


def arrived(name: str, arrival: int, priority: int = 0, choice: int = 0) -> Sequence:
    sequence = make_sequence(name, priority=priority)
    sequence.arrival, sequence.choice = arrival, choice
    return sequence


def test_fcfs_goes_by_arrival_then_choice() -> None:
    members = [arrived("a", 0), arrived("b", 1), arrived("b", 1, choice=1), arrived("c", 2)]
    for seed in range(5):
        queue = PolicyQueue(ORDERS["fcfs"])
        for member in random.Random(seed).sample(members, 4):
            queue.add(member)
        assert list(queue) == members
        assert list(reversed(queue)) == members[::-1]


def test_priority_goes_by_value_then_arrival() -> None:
    late_and_urgent, early, late = arrived("u", 9, -1), arrived("e", 1), arrived("l", 2)
    background = arrived("bg", 0, 5)
    queue = PolicyQueue(ORDERS["priority"])
    for member in (background, late, early, late_and_urgent):
        queue.add(member)
    assert list(queue) == [late_and_urgent, early, late, background]


def test_members_leave_by_identity() -> None:
    first, second = arrived("a", 0), arrived("b", 1)
    queue = PolicyQueue(ORDERS["fcfs"])
    queue.add(first)
    queue.add(second)
    queue.remove(first)
    assert list(queue) == [second]
    with pytest.raises(AssertionError):
        queue.remove(first)
    with pytest.raises(AssertionError):
        queue.remove(arrived("b", 1))


def test_iteration_stands_changes() -> None:
    queue = PolicyQueue(ORDERS["fcfs"])
    members = [arrived("x", arrival) for arrival in range(4)]
    for member in members:
        queue.add(member)
    seen = []
    for member in queue:
        seen.append(member)
        queue.remove(member)
    assert seen == members
    assert len(queue) == 0
