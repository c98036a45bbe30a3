"""How fast a tier gives blocks back, by what it has shown."""

from __future__ import annotations

import time
from collections.abc import Callable

STALE_S = 10.0
"""A rate that nothing has confirmed for so long is worth another look."""

_WEIGHT = 0.5
"""What the last load counts for in the mean: a tier that has become slow is declined after one or two."""


class LoadRate:
    """Bytes a second, a mean in which new loads count most.

    initial: what holds before the first load, in bytes a second.
    clock: seconds that only grow.
    """

    def __init__(self, initial: float, clock: Callable[[], float] = time.monotonic) -> None:
        assert initial > 0, f"a rate of {initial} bytes a second"
        self.bytes_per_s = initial
        self._clock = clock
        self._noted_at = clock()

    @property
    def is_stale(self) -> bool:
        """Whether it has been long since anything was read."""
        return self._clock() - self._noted_at > STALE_S

    def note(self, num_bytes: int, seconds: float) -> None:
        """So many bytes, at least one, took so long."""
        self._noted_at = self._clock()
        seconds_a_byte = max(seconds, 1e-9) / num_bytes
        mean = _WEIGHT * seconds_a_byte + (1.0 - _WEIGHT) / self.bytes_per_s
        self.bytes_per_s = 1.0 / mean

    def seconds_for(self, num_bytes: int) -> float:
        """How long so many bytes would take."""
        return num_bytes / self.bytes_per_s
