"""A cache that tells of its changes as an engine does: numbered events, and snapshots on demand."""

from __future__ import annotations

from collections.abc import Sequence

from core.block_hash import BlockHash
from core.errors import EngineDeadError
from core.events import CacheEvent, EventKind, Tier
from kvindex.base import CacheSnapshot


class FakeCache:
    """What it holds is the truth that an index must come to. `is_dead`: snapshots fail."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[BlockHash]] = {tier: set() for tier in Tier}
        self.last_number = 0
        self.num_snapshots = 0
        self.is_dead = False

    def apply(self, event: CacheEvent) -> tuple[int, list[CacheEvent]]:
        """Change and return what `accept` takes: the event's number, and the event."""
        for tier in Tier if event.tier is None else [event.tier]:
            if event.kind is EventKind.STORED:
                self.held[tier].update(event.hashes)
            elif event.kind is EventKind.REMOVED:
                self.held[tier].difference_update(event.hashes)
            else:
                self.held[tier].clear()
        self.last_number += 1
        return self.last_number, [event]

    def store(
        self, hashes: Sequence[BlockHash], tier: Tier = Tier.DEVICE
    ) -> tuple[int, list[CacheEvent]]:
        return self.apply(CacheEvent(EventKind.STORED, tier, tuple(hashes)))

    def remove(
        self, hashes: Sequence[BlockHash], tier: Tier = Tier.DEVICE
    ) -> tuple[int, list[CacheEvent]]:
        return self.apply(CacheEvent(EventKind.REMOVED, tier, tuple(hashes)))

    async def take_snapshot(self) -> CacheSnapshot:
        if self.is_dead:
            raise EngineDeadError("engine: gone")
        self.num_snapshots += 1
        held = {tier: sorted(hashes) for tier, hashes in self.held.items()}
        return CacheSnapshot(self.last_number, held)
