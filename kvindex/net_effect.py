"""What a batch of cache events comes to, so that Redis touches each block hash once.

Per hash the tiers it was last stored in and last removed from; a clear forgets what came before it. Applying the
result over any state that already holds a part of the batch gives the same state as applying it once, because the
last word on each (hash, tier) wins: that makes a repeated call safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.block_hash import BlockHash
from core.events import CacheEvent, EventKind, Tier

TIER_BITS: Mapping[Tier, int] = {Tier.DEVICE: 1, Tier.HOST: 2, Tier.DISK: 4}
"""Bit of each indexed tier in a block's entry. Part of the schema."""

ALL_TIERS = sum(TIER_BITS.values())


@dataclass(frozen=True, slots=True)
class NetEffect:
    """The outcome of a batch of events, in the order: clear, then the groups (whose hashes are distinct).

    cleared: bits of the tiers that were emptied.
    groups: (bits to set, bits to drop) -> hashes.
    """

    cleared: int
    groups: Mapping[tuple[int, int], Sequence[BlockHash]]


def net_effect(events: Iterable[CacheEvent]) -> NetEffect:
    """The outcome of `events`, applied in their order."""
    cleared = 0
    changes: dict[BlockHash, tuple[int, int]] = {}
    for event in events:
        bits = ALL_TIERS if event.tier is None else TIER_BITS.get(event.tier, 0)
        if event.kind is EventKind.CLEARED:
            cleared |= bits
            changes = {h: (s & ~bits, d & ~bits) for h, (s, d) in changes.items()}
            continue
        is_stored = event.kind is EventKind.STORED
        for block_hash in event.hashes:
            set_bits, dropped = changes.get(block_hash, (0, 0))
            if is_stored:
                changes[block_hash] = (set_bits | bits, dropped & ~bits)
            else:
                changes[block_hash] = (set_bits & ~bits, dropped | bits)
    return NetEffect(cleared, _grouped(changes))


def _grouped(
    changes: Mapping[BlockHash, tuple[int, int]],
) -> Mapping[tuple[int, int], Sequence[BlockHash]]:
    groups: dict[tuple[int, int], list[BlockHash]] = {}
    for block_hash, change in changes.items():
        if change != (0, 0):
            groups.setdefault(change, []).append(block_hash)
    return groups
