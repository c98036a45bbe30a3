"""Who goes first, and who gives way.

One total order decides both: the waiting are admitted from its front, and when blocks run out the running give way
from its back. So the first in order is never set back by anybody, and every sequence ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from engine.sequence import Sequence

OrderKey = Callable[[Sequence], tuple[int, ...]]


def _by_arrival(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.arrival, sequence.choice)


def _by_priority(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.request.priority, sequence.arrival, sequence.choice)


ORDERS: dict[str, OrderKey] = {"fcfs": _by_arrival, "priority": _by_priority}


class PolicyQueue:
    """Sequences in policy order. Iterating walks a copy, so members may come and go meanwhile."""

    __slots__ = ("_members", "key")

    def __init__(self, key: OrderKey) -> None:
        self.key = key
        self._members: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        index = bisect_left(self._members, self.key(sequence), key=self.key)
        return index < len(self._members) and self._members[index] is sequence

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.copy())

    def __reversed__(self) -> Iterator[Sequence]:
        return iter(self._members[::-1])

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at its place."""
        insort(self._members, sequence, key=self.key)

    def remove(self, sequence: Sequence) -> None:
        """Take a member out."""
        index = bisect_left(self._members, self.key(sequence), key=self.key)
        assert index < len(self._members), "the sequence is not in this queue"
        assert self._members[index] is sequence, "another sequence stands at this one's place"
        del self._members[index]
