"""What a worker tells the world of its cache.

Events of one worker#epoch are numbered without gaps; a reader that sees a gap asks for a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.block_hash import BlockHash


class Tier(StrEnum):
    """Where KV rests, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class EventKind(StrEnum):
    """What happened to the named blocks in the named tier."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change of what one tier of one worker holds.

    kind: stored, removed, or cleared (all of the tier, or all tiers when `tier` is None).
    tier: the tier that changed.
    hashes: the blocks, in chain order for stored; empty for cleared.
    parent: the hash before hashes[0], for readers that keep a tree; None at the head or when unknown.
    token_ids: tokens of the stored blocks, for readers with hashes of their own; may be empty.
    foreign_hashes: another engine's names for the same blocks; may be empty.
    """

    kind: EventKind
    tier: Tier | None = Tier.DEVICE
    hashes: tuple[BlockHash, ...] = ()
    parent: BlockHash | None = None
    token_ids: tuple[int, ...] = ()
    foreign_hashes: tuple[bytes, ...] = ()
