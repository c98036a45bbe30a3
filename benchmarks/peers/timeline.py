"""When the tokens of an answer came, and the figures that follow from it. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timeline:
    """One answer: `counts[i]` tokens had come `times_s[i]` seconds after the request was sent.

    Both only grow. A server may tell several tokens at once (one whose text is not yet whole is told with the next),
    so there may be fewer points than tokens.
    """

    times_s: tuple[float, ...]
    counts: tuple[int, ...]
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.counts):
            raise ValueError(f"{len(self.times_s)} times for {len(self.counts)} counts: no answer")

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0]

    @property
    def last_s(self) -> float:
        """Time to the last token."""
        return self.times_s[-1]

    @property
    def num_tokens(self) -> int:
        """All tokens of the answer."""
        return self.counts[-1]

    def num_tokens_until(self, at_s: float) -> int:
        """Tokens that had come at a moment."""
        return max(
            (c for t, c in zip(self.times_s, self.counts, strict=True) if t <= at_s), default=0
        )


def decode_rate(line: Timeline) -> float:
    """Tokens/s of one stream after its first token."""
    return (line.num_tokens - line.counts[0]) / (line.last_s - line.first_s)


def whole_rate(lines: Sequence[Timeline]) -> float:
    """Output tokens/s of streams sent together, from sending to the last token of all."""
    return sum(line.num_tokens for line in lines) / max(line.last_s for line in lines)


def joint_decode_rate(lines: Sequence[Timeline]) -> float:
    """Output tokens/s of streams sent together, in the phase after the last of them had its first token."""
    begin_s = max(line.first_s for line in lines)
    end_s = max(line.last_s for line in lines)
    num_tokens = sum(line.num_tokens - line.num_tokens_until(begin_s) for line in lines)
    return num_tokens / (end_s - begin_s) if num_tokens else 0.0


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: how far rounds lie apart."""
    return (max(values) - min(values)) / statistics.median(values)
