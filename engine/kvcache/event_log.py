"""Cache events of one pool, in order, not yet published.

Neighbouring stores that continue one chain become one event, and so do neighbouring removals.
"""

from __future__ import annotations

from core.block_hash import BlockHash
from core.events import CacheEvent, EventKind, Tier
from engine.kvcache.chain import BlockContent


class _Entry:
    __slots__ = ("hashes", "kind", "parent", "token_ids")

    def __init__(self, kind: EventKind, parent: BlockHash | None = None) -> None:
        self.kind = kind
        self.parent = parent
        self.hashes: list[BlockHash] = []
        self.token_ids: list[int] = []

    def freeze(self) -> CacheEvent:
        return CacheEvent(
            self.kind, Tier.DEVICE, tuple(self.hashes), self.parent, tuple(self.token_ids)
        )


class EventLog:
    """Collects what a pool stored, removed and cleared.

    with_token_ids: whether stored events carry their tokens (readers with hashes of their own need them).
    """

    def __init__(self, *, with_token_ids: bool = False) -> None:
        self._with_token_ids = with_token_ids
        self._entries: list[_Entry] = []

    def stored(self, content: BlockContent) -> None:
        """A block's content became findable."""
        last = self._entries[-1] if self._entries else None
        if last is None or last.kind is not EventKind.STORED or last.hashes[-1] != content.parent:
            last = _Entry(EventKind.STORED, content.parent)
            self._entries.append(last)
        last.hashes += content.hashes
        if self._with_token_ids:
            last.token_ids += content.token_ids

    def removed(self, content: BlockContent) -> None:
        """The last copy of a block's content is gone."""
        if not self._entries or self._entries[-1].kind is not EventKind.REMOVED:
            self._entries.append(_Entry(EventKind.REMOVED))
        self._entries[-1].hashes += content.hashes

    def cleared(self) -> None:
        """Everything is gone at once; what was logged before no longer matters to any reader."""
        self._entries = [_Entry(EventKind.CLEARED)]

    def take(self) -> list[CacheEvent]:
        """All events since the last call, oldest first."""
        entries, self._entries = self._entries, []
        return [entry.freeze() for entry in entries]
