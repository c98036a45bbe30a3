"""Choices of a process that no operation takes as a parameter."""

from __future__ import annotations

INVARIANT_SPLIT_TOKENS = 1024
"""Positions of one part of a row's attention where its bits may not depend on the batch."""

_is_batch_invariant = False


def use_batch_invariance(is_on: bool) -> None:
    """Whether a row's bits must not depend on the rows beside it, on chunks, or on the batch.

    Attention then takes parts of a fixed length and products one tile size for every number of rows; both cost speed.
    """
    global _is_batch_invariant
    _is_batch_invariant = is_on


def is_batch_invariant() -> bool:
    """The choice in force."""
    return _is_batch_invariant


def split_tokens() -> int | None:
    """The fixed length of attention's parts, or None where the batch decides."""
    return INVARIANT_SPLIT_TOKENS if _is_batch_invariant else None
