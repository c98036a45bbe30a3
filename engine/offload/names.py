"""The hashes that readers of cache events know a tier's blocks by."""

from __future__ import annotations

from collections.abc import Iterable

from core.block_hash import BlockHash
from engine.kvcache.chain import BlockContent
from kvtransfer.tiers.base import BlockKey
from kvtransfer.tiers.connector import KVConnector

PUBLISHED_GROUP = 0


class BlockNames:
    """Where a block holds several hash blocks, the hashes inside it, by its own.

    What an earlier process left on disk is known by its last hash alone.
    """

    def __init__(self) -> None:
        self._inner: dict[BlockHash, tuple[BlockHash, ...]] = {}

    def note(self, content: BlockContent) -> None:
        """A block goes down: remember its hashes, if it has more than one."""
        if len(content.hashes) > 1:
            self._inner[content.key] = content.hashes

    def forget_unless(self, key: BlockKey, connector: KVConnector) -> None:
        """A tier has a block no more: forget it unless another one of our own has it."""
        if not any(connector.has(name, key) for name in connector.own_names):
            self._inner.pop(key.hash, None)

    def hashes(self, keys: Iterable[BlockKey]) -> tuple[BlockHash, ...]:
        """All hashes of blocks of the published group, in order."""
        return tuple(
            name
            for key in keys
            if key.group == PUBLISHED_GROUP
            for name in self._inner.get(key.hash, (key.hash,))
        )
