"""A cache of three tiers for a fake engine: holds what requests brought, tells of it in events, forgets when asked.

The device holds the first half of every chain, the host three quarters, the disk all of it, so that the tiers can be
told apart. Nothing is ever evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.block_hash import BlockHash, HashRoot, hash_chain
from core.events import CacheEvent, EventKind, Tier
from core.request import Request

QUARTERS = {Tier.DEVICE: 2, Tier.HOST: 3, Tier.DISK: 4}
"""How much of a chain each tier takes."""


class FakeTiers:
    """What is held in which tier."""

    def __init__(self, root: HashRoot) -> None:
        self._root = root
        self._held: dict[Tier, dict[BlockHash, None]] = {tier: {} for tier in QUARTERS}

    def use(self, request: Request) -> tuple[int, list[CacheEvent]]:
        """Tokens of the prompt that were held, and the events of holding all of it from now on."""
        chain = hash_chain(self._root, request.prompt_token_ids, request.cache_salt)
        num_held = sum(self._is_held(block_hash) for block_hash in chain)
        events = []
        for tier, quarters in QUARTERS.items():
            new = [h for h in chain[: len(chain) * quarters // 4] if h not in self._held[tier]]
            if new:
                self._held[tier] |= dict.fromkeys(new)
                events.append(CacheEvent(EventKind.STORED, tier, tuple(new)))
        return num_held * self._root.block_size, events

    def reset(self) -> list[CacheEvent]:
        """Forget everything, and say so tier by tier."""
        cleared = [tier for tier, held in self._held.items() if held]
        for tier in cleared:
            self._held[tier].clear()
        return [CacheEvent(EventKind.CLEARED, tier) for tier in cleared]

    def snapshot(self) -> dict[Tier, Sequence[BlockHash]]:
        """Everything held."""
        return {tier: list(held) for tier, held in self._held.items()}

    def _is_held(self, block_hash: BlockHash) -> bool:
        return any(block_hash in held for held in self._held.values())
