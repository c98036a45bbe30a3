"""Least recently used: the key whose last use is longest ago leaves first."""

from __future__ import annotations

from collections.abc import Sequence, Set

from kvtransfer.tiers.policies.base import EvictionPolicy, Key
from kvtransfer.tiers.policies.recency_list import RecencyList


class LruPolicy(EvictionPolicy[Key]):
    """One list in the order of last use. The end of a load or store counts as a use."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: RecencyList[Key] = RecencyList()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def figures(self) -> dict[str, float]:
        """Nothing: a list has no choice to tell of."""
        return {}

    def _use(self, key: Key) -> None:
        self._keys.use(key)

    def _replace(self, keys: Sequence[Key], num_leaving: int, keep: Set[Key]) -> list[Key]:
        evicted = self._keys.oldest(num_leaving, keep)
        for key in evicted:
            self._keys.remove(key)
        for key in keys:
            self._keys.add(key, is_pinned=True)
        return evicted

    def _set_aside(self, key: Key) -> None:
        self._keys.pin(key)

    def _put_back(self, key: Key) -> None:
        self._keys.unpin(key)

    def _drop(self, key: Key) -> None:
        self._keys.remove(key)
