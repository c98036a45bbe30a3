"""Stop strings: found in the text as it grows, never shown before they are complete.

The stop string that completes first wins; of two that complete at the same character, the one listed first. When
the stop is excluded from the output, as many characters are held back as an unfinished one could cover.
"""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(
    text: str, num_new_chars: int, stops: Sequence[str], *, include: bool = False
) -> tuple[str, int] | None:
    """The stop string that completes first within the last `num_new_chars` of `text`, and where to cut `text`."""
    best: tuple[int, str] | None = None
    num_old = len(text) - num_new_chars
    for stop in stops:
        start = text.find(stop, max(0, num_old - len(stop) + 1))
        if start >= 0 and (best is None or start + len(stop) < best[0]):
            best = (start + len(stop), stop)
    if best is None:
        return None
    end, stop = best
    return stop, end if include else end - len(stop)


class StopBuffer:
    """The end of one choice's text: context for the search, and what is held back.

    `_tail` is the last characters of the text, of which the last `_num_held` have not been given out.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._context = max((len(stop) for stop in stops), default=1) - 1
        self._hold = 0 if include else self._context
        self._tail = ""
        self._num_held = 0

    def push(self, delta: str, *, searched: bool = True) -> tuple[str, str | None]:
        """What may be given out after `delta`, and the stop string that `delta` completed.

        searched: whether a stop string may complete in `delta` (not before `min_tokens`).
        """
        if not self._stops:
            return delta, None
        text = self._tail + delta
        given = len(self._tail) - self._num_held
        found = (
            find_stop(text, len(delta), self._stops, include=self._include) if searched else None
        )
        if found is not None:
            stop, cut = found
            self._tail, self._num_held = "", 0
            return text[given:cut], stop
        allowed = max(given, len(text) - self._hold)
        keep_from = max(0, min(allowed, len(text) - self._context))
        self._tail, self._num_held = text[keep_from:], len(text) - allowed
        return text[given:allowed], None

    def finish(self) -> str:
        """What was held back, for a choice that ends without a stop string."""
        held = self._tail[len(self._tail) - self._num_held :]
        self._tail, self._num_held = "", 0
        return held
