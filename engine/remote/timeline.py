"""Named moments of a request's way through a worker, in milliseconds since the worker got it.

The names follow the numbered steps of a split request: `received`, `scheduled`, `prefill_called`, `announced`,
`granted`, `first_token`, `kv_complete`, `admitted`, `second_token`, `finished`. A moment that happens again (a new
attempt) keeps its latest time.
"""

from __future__ import annotations

from engine.channel import monotonic_ms


class Timeline:
    """When what happened to one request."""

    def __init__(self) -> None:
        self._start = monotonic_ms()
        self._moments: dict[str, float] = {"received": 0.0}

    def mark(self, name: str) -> None:
        """Note that `name` happens now."""
        self._moments[name] = monotonic_ms() - self._start

    def mark_first(self, name: str) -> None:
        """Note that `name` happens now, unless it has happened before."""
        if name not in self._moments:
            self.mark(name)

    def elapsed_ms(self) -> float:
        """Milliseconds since the worker got the request."""
        return monotonic_ms() - self._start

    def moments_ms(self) -> dict[str, float]:
        """Every moment so far."""
        return dict(self._moments)
