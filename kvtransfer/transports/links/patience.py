"""How often a mover looks at what no selector tells of."""

from __future__ import annotations

import time

_SHORTEST_SECONDS = 20e-6
_LONGEST_SECONDS = 2e-3
_SELECTOR_SECONDS = 1e-3
"""A selector waits for whole milliseconds; shorter pauses are slept."""


class Patience:
    """Pauses that double from 20 us to 2 ms as long as nothing goes on. Belongs to one mover thread."""

    def __init__(self) -> None:
        self._pause_s = _SHORTEST_SECONDS

    def wait_s(self) -> float:
        """What a selector may wait now, in seconds; a pause that is shorter than it can wait is over already."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_SECONDS)
        if pause_s >= _SELECTOR_SECONDS:
            return pause_s
        time.sleep(pause_s)
        return 0.0

    def renew(self) -> None:
        """Something has gone on: begin again with the shortest."""
        self._pause_s = _SHORTEST_SECONDS
