"""Keys by age of their last use, with those in use set aside.

A pinned key belongs to the list and counts, but has no place in the order: so looking for the oldest never walks over
pinned keys, and a key whose last pin goes is the most recent. Every operation on one key is constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set
from itertools import islice
from typing import Generic

from kvtransfer.tiers.policies.base import Key


class RecencyList(Generic[Key]):
    """A list with its oldest key first."""

    __slots__ = ("_idle", "_pinned")

    def __init__(self) -> None:
        self._idle: OrderedDict[Key, None] = OrderedDict()
        self._pinned: set[Key] = set()

    def __len__(self) -> int:
        return len(self._idle) + len(self._pinned)

    def __contains__(self, key: object) -> bool:
        return key in self._idle or key in self._pinned

    def __iter__(self) -> Iterator[Key]:
        """Keys without a pin, oldest first."""
        return iter(self._idle)

    def add(self, key: Key, *, is_pinned: bool) -> None:
        """A new key, the most recent."""
        assert key not in self, f"{key!r} is listed already"
        if is_pinned:
            self._pinned.add(key)
        else:
            self._idle[key] = None

    def use(self, key: Key) -> None:
        """A listed key becomes the most recent; a pinned one will be when its pin goes."""
        if key in self._idle:
            self._idle.move_to_end(key)

    def pin(self, key: Key) -> None:
        """Set a key aside."""
        del self._idle[key]
        self._pinned.add(key)

    def unpin(self, key: Key) -> None:
        """Put a key back, as the most recent."""
        self._pinned.remove(key)
        self._idle[key] = None

    def remove(self, key: Key) -> bool:
        """Take a listed key out; whether it was pinned."""
        if key in self._pinned:
            self._pinned.remove(key)
            return True
        del self._idle[key]
        return False

    def oldest(self, num_keys: int, keep: Set[Key]) -> list[Key]:
        """Up to `num_keys` keys without a pin and not in `keep`, oldest first."""
        return list(islice((key for key in self._idle if key not in keep), num_keys))
