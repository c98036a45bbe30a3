"""Which blocks are used often enough to be worth a write.

The rule of KVBM's filter before its disk tier: a key's frequency is 1 at its first use and doubles with each further
one, and all frequencies fall by one from time to time, which forgets keys at 0. Time here is uses counted, not
seconds, so that a replay gives the same answers; and the fall happens a little with each use, never all at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

DECAY_USES = 1_000_000
"""In so many uses a key's frequency falls by one, where nobody says otherwise."""

_MOST = 1 << 20
"""A frequency stops doubling here: a key that was hot is forgotten in bounded time, and numbers stay small."""


class FrequencyFilter(Generic[Key]):
    """Frequencies of the `max_keys` keys used last.

    min_frequency: what a key must have to pass; 1 passes every key that was ever used, 0 every key.
    decay_uses: in so many uses a key's frequency falls by one; 0 for never.
    """

    def __init__(self, min_frequency: int, max_keys: int, decay_uses: int) -> None:
        assert max_keys >= 1, f"a filter of {max_keys} keys knows none"
        self.min_frequency = min_frequency
        self._max_keys = max_keys
        self._decay_uses = decay_uses
        self._num_uses = 0
        # key -> (frequency at its last use, number of that use), last use longest ago first
        self._known: OrderedDict[Key, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def use(self, key: Key) -> None:
        """One more use of a key."""
        self._num_uses += 1
        doubled = min(2 * self.frequency(key), _MOST)
        self._known[key] = (max(1, doubled), self._num_uses)
        self._known.move_to_end(key)
        if len(self._known) > self._max_keys:
            self._known.popitem(last=False)

    def frequency(self, key: Key) -> int:
        """A key's frequency now; 0 for one that is not known (any more)."""
        known = self._known.get(key)
        if known is None:
            return 0
        frequency, used_at = known
        if self._decay_uses:
            frequency -= (self._num_uses - used_at) // self._decay_uses
        return max(0, frequency)

    def passes(self, key: Key) -> bool:
        """Whether a key is used often enough."""
        return self.frequency(key) >= self.min_frequency
