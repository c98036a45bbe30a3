"""The cards that tuning tables have rows for, as numbers. Knows neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Card:
    """One row of the tuning tables.

    name: the row's key.
    capability: the oldest compute capability that takes this row, major times 10 plus minor.
    num_multiprocessors: how many programs run side by side at least; for dividing work, never for correctness.
    has_fp8: whether the hardware converts float8_e4m3fn.
    max_shared_bytes: shared memory that one program may have.
    """

    name: str
    capability: int
    num_multiprocessors: int
    has_fp8: bool
    max_shared_bytes: int


INTERPRETER = Card("interpreter", 0, 4, False, 1 << 30)
"""Not a card: small tiles, since each operation of a program costs the interpreter the same, however small."""

SM_80 = Card("sm_80", 80, 108, False, 99 << 10)
"""Ampere. Cards of 8.6 and 8.9 take this row too, so it keeps to their 99 KiB, below the 163 KiB of 8.0."""
SM_90 = Card("sm_90", 90, 132, True, 227 << 10)
SM_100 = Card("sm_100", 100, 148, True, 227 << 10)

CARDS = (SM_80, SM_90, SM_100)


def card_of_capability(major: int, minor: int) -> Card:
    """The row for a card of compute capability `major.minor`."""
    capability = 10 * major + minor
    if capability < SM_80.capability:
        raise ConfigError(
            f"compute capability: {major}.{minor} must be at least 8.0 (Ampere) for the triton backend"
        )
    if major >= 12:  # consumer cards of Blackwell: 99 KiB of shared memory, no tensor memory
        return SM_80
    return [card for card in CARDS if card.capability <= capability][-1]
