"""Adaptive replacement: recency and frequency share one store, and misses decide how much each gets.

N. Megiddo and D. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003, figure 4. With capacity c:

    T1, T2   resident keys: used once since they came, used again
    B1, B2   ghosts: keys that T1 and T2 have evicted, without their bytes
    p        target size of T1, a real number in [0, c]

    x in T1 or T2            to the recent end of T2
    x in B1                  p = min(p + max(|B2| / |B1|, 1), c); replace; x to T2
    x in B2                  p = max(p - max(|B1| / |B2|, 1), 0); replace; x to T2
    x nowhere                |T1| + |B1| = c: forget the oldest of B1 and replace, or, where B1 is empty, evict the
                             oldest of T1 without a ghost;
                             else all four hold 2c: forget the oldest of B2; replace.  x to T1
    replace                  |T1| > p, or |T1| = p and x in B2: the oldest of T1 to B1; else the oldest of T2 to B2

So |T1| + |T2| <= c, |T1| + |B1| <= c and all four together <= 2c hold at all times.

What a store of blocks in use adds to the paper:
- Keys with a pin, and those to be kept, are passed over; where the list that `replace` prefers has no other key, the
  other list gives one. Either way the key becomes a ghost of its own list, so the bounds hold.
- Nothing leaves while there is room: a store has free slots again when a store failed or bytes were damaged.
- A use of a ghost (`touch`) is not yet a miss: p moves when the key comes in, so once a request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence, Set

from kvtransfer.tiers.policies.base import EvictionPolicy, Key
from kvtransfer.tiers.policies.recency_list import RecencyList


class ArcPolicy(EvictionPolicy[Key]):
    """ARC over keys; T1, T2, B1, B2 and p are named as in the paper."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._t1: RecencyList[Key] = RecencyList()
        self._t2: RecencyList[Key] = RecencyList()
        self._b1: OrderedDict[Key, None] = OrderedDict()
        self._b2: OrderedDict[Key, None] = OrderedDict()
        self._target = 0.0
        self._num_ghost_hits = {"b1": 0, "b2": 0}

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2

    @property
    def target(self) -> float:
        """p: how many keys T1 should have."""
        return self._target

    def figures(self) -> dict[str, float]:
        """The target, the sizes of the four lists, and how often a key came in that was a ghost of either kind."""
        return {
            "target": self._target,
            "t1": len(self._t1),
            "t2": len(self._t2),
            "b1": len(self._b1),
            "b2": len(self._b2),
            "b1_hits_total": self._num_ghost_hits["b1"],
            "b2_hits_total": self._num_ghost_hits["b2"],
        }

    # ---- one use

    def _use(self, key: Key) -> None:
        if key in self._t2:
            self._t2.use(key)
        else:
            self._t2.add(key, is_pinned=self._t1.remove(key))

    def _set_aside(self, key: Key) -> None:
        self._list_of(key).pin(key)

    def _put_back(self, key: Key) -> None:
        self._list_of(key).unpin(key)

    def _drop(self, key: Key) -> None:
        self._list_of(key).remove(key)

    def _list_of(self, key: Key) -> RecencyList[Key]:
        return self._t1 if key in self._t1 else self._t2

    # ---- keys that come in

    def _replace(self, keys: Sequence[Key], num_leaving: int, keep: Set[Key]) -> list[Key]:
        # Taken once for the whole batch: nothing it does makes a key evictable or changes the order of those that are.
        from_t1 = deque(self._t1.oldest(num_leaving, keep))
        from_t2 = deque(self._t2.oldest(num_leaving, keep))
        evicted: list[Key] = []
        for key in keys:
            was_in_b2 = key in self._b2
            leaves_no_ghost = self._make_room_for_ghosts(key)
            if len(self) == self.capacity:
                evicted.append(self._evict(from_t1, from_t2, was_in_b2, leaves_no_ghost))
            self._take_in(key)
        return evicted

    def _make_room_for_ghosts(self, key: Key) -> bool:
        """Adapt p to a ghost, or forget the ghost that must go for a new key; whether the key that leaves for it,
        if one does, becomes none."""
        if key in self._b1:
            self._num_ghost_hits["b1"] += 1
            self._target = min(
                self._target + max(len(self._b2) / len(self._b1), 1.0), float(self.capacity)
            )
        elif key in self._b2:
            self._num_ghost_hits["b2"] += 1
            self._target = max(self._target - max(len(self._b1) / len(self._b2), 1.0), 0.0)
        elif len(self._t1) + len(self._b1) == self.capacity:
            if not self._b1:
                return True
            self._b1.popitem(last=False)
        elif len(self) + len(self._b1) + len(self._b2) == 2 * self.capacity:
            self._b2.popitem(last=False)
        return False

    def _evict(
        self, from_t1: deque[Key], from_t2: deque[Key], came_from_b2: bool, leaves_no_ghost: bool
    ) -> Key:
        """The paper's REPLACE. from_t1, from_t2: evictable keys of either list, oldest first."""
        size = len(self._t1)
        prefers_t1 = size > self._target or (size == self._target and came_from_b2)
        if from_t1 and (prefers_t1 or not from_t2):
            key = from_t1.popleft()
            self._t1.remove(key)
            ghosts = self._b1
        else:
            key = from_t2.popleft()
            self._t2.remove(key)
            ghosts = self._b2
        if not leaves_no_ghost:
            ghosts[key] = None
        return key

    def _take_in(self, key: Key) -> None:
        was_ghost = key in self._b1 or key in self._b2
        self._b1.pop(key, None)
        self._b2.pop(key, None)
        (self._t2 if was_ghost else self._t1).add(key, is_pinned=True)
