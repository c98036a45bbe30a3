"""What every eviction policy promises.

A policy orders the keys that a tier holds and says which leave when others come. It is told of every use and never
sees bytes or slots. One thread calls it.

    absent   --admit-->    resident, pinned once (its bytes are on their way in)
    pinned   --unpin-->    resident, evictable; the most recent of all when its last pin goes
    resident --pin-->      resident, never evicted while pinned
    resident --evicted-->  absent (the answer of `admit`)
    any      --discard-->  absent

A tier's capacity is in keys, and pinned keys count. Where several keys are given they are a chain, head first, and
are used in reverse, so that the head ends most recent and leaves last: what stays is then a prefix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence, Set
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class EvictionPolicy(ABC, Generic[Key]):
    """Which keys of a bounded store leave, and in which order. capacity: the most keys resident at a time."""

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1, f"a store of {capacity} blocks holds none"
        self.capacity = capacity
        self._num_pins: dict[Key, int] = {}

    @abstractmethod
    def __len__(self) -> int:
        """Resident keys, pinned ones included."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether a key is resident."""

    @property
    def num_pinned(self) -> int:
        """Resident keys with a pin."""
        return len(self._num_pins)

    @property
    def num_evictable(self) -> int:
        """Resident keys without a pin."""
        return len(self) - len(self._num_pins)

    def touch(self, chain: Sequence[Key]) -> None:
        """A request uses a chain. Keys that are not resident are passed over."""
        for key in reversed(chain):
            if key in self:
                self._use(key)

    def admit(self, keys: Sequence[Key], keep: Set[Key] = frozenset()) -> list[Key] | None:
        """Make absent, distinct keys resident, each pinned once; the keys that left for them, first one first.

        keep: keys that must not leave for these, such as those of the same chain that are resident already.
        None, with nothing changed, when they cannot all come in. Costs what the batch is long, however much is pinned.
        """
        num_leaving = max(0, len(self) + len(keys) - self.capacity)
        num_kept = sum([key in self and key not in self._num_pins for key in keep])
        if num_leaving > self.num_evictable - num_kept:
            return None
        self._num_pins.update(dict.fromkeys(keys, 1))
        return self._replace(keys, num_leaving, keep)

    def pin(self, keys: Sequence[Key]) -> None:
        """Resident keys are not evicted until as many `unpin`s."""
        for key in keys:
            assert key in self, f"{key!r} is pinned and not resident"
            if key in self._num_pins:
                self._num_pins[key] += 1
            else:
                self._num_pins[key] = 1
                self._set_aside(key)

    def unpin(self, keys: Sequence[Key]) -> None:
        """Take one pin off each of a chain's keys."""
        for key in reversed(keys):
            num_pins = self._num_pins[key] - 1
            if num_pins:
                self._num_pins[key] = num_pins
            else:
                del self._num_pins[key]
                self._put_back(key)

    def discard(self, key: Key) -> None:
        """A resident key is gone, pinned or not, and not by eviction: its store failed or its bytes are damaged."""
        assert key in self, f"{key!r} is discarded and not resident"
        self._num_pins.pop(key, None)
        self._drop(key)

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """What the policy can say of itself for metrics, by name; counters end in `_total`."""

    # ---- what a policy fills in

    @abstractmethod
    def _use(self, key: Key) -> None:
        """A resident key, pinned or not, is used."""

    @abstractmethod
    def _replace(self, keys: Sequence[Key], num_leaving: int, keep: Set[Key]) -> list[Key]:
        """Take `keys` in, pinned, and evict exactly `num_leaving` keys, of which there are enough; those evicted."""

    @abstractmethod
    def _set_aside(self, key: Key) -> None:
        """A resident key has its first pin."""

    @abstractmethod
    def _put_back(self, key: Key) -> None:
        """A resident key has no pin any more: it is the most recent."""

    @abstractmethod
    def _drop(self, key: Key) -> None:
        """A resident key is gone for good."""
