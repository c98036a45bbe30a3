"""What an engine's loop needs of the tiers below its pool, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from core.block_hash import BlockHash
from core.events import CacheEvent, EventKind, Tier
from core.ids import BlockId
from engine.kvcache.block_pool import HeldContent
from engine.kvcache.storage import Storage
from engine.offload.loads import LoadSide
from engine.offload.names import BlockNames
from engine.offload.stores import StoreSide
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import TierStats
from kvtransfer.events import PostEvent
from kvtransfer.tiers.base import BlockKey, TierChange
from kvtransfer.tiers.connector import KVConnector
from kvtransfer.tiers.mover import AskDone, LoadDone, StoreDone

_LEAST_TOKENS_TO_LEARN = 64
"""Steps of fewer tokens say little of what computing a prompt costs."""


class Offload:
    """Loads, stores, events and figures of one engine's tiers; with no tier, nothing ever happens. Engine thread only.

    connector: owned from now on. storage: memory of the pool. post: the engine's inbox.
    lazy_blocks: see StoreSide. arriving_share, prefill_tokens_per_s: see LoadSide.
    """

    def __init__(
        self,
        connector: KVConnector,
        scheduler: Scheduler,
        storage: Storage,
        post: PostEvent,
        *,
        lazy_blocks: int = 0,
        arriving_share: float = 0.5,
        prefill_tokens_per_s: float = 1000.0,
    ) -> None:
        self._connector = connector
        self._scheduler = scheduler
        self._pool = scheduler.kv.pool
        self.loads = LoadSide(
            connector,
            scheduler,
            storage,
            post,
            arriving_share=arriving_share,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        self._names = BlockNames()
        self.stores = StoreSide(connector, self._pool, storage, self._names, lazy_blocks)
        self._restored = connector.held()
        if connector.names:
            scheduler.use_tiers(self)

    # ---- requests

    def begin(self, sequence: Sequence) -> None:
        """A request begins: it uses its whole chain in every tier.

        What the pool has of it is offered to them, unless they wait for what leaves it.
        """
        if not self._connector.names:
            return
        kv = self._scheduler.kv
        kv.attach(sequence)
        contents = kv.contents(sequence)
        groups = range(kv.num_groups)
        self._connector.touch([BlockKey(c.key, group) for c in contents for group in groups])
        if self.stores.is_lazy:
            return
        matched = kv.matched(sequence)
        self.stores.offer(
            [
                HeldContent(matched[group][position], group, contents[position])
                for position in range(len(matched[0]))
                for group in groups
            ]
        )

    def look_up(self, sequence: Sequence) -> bool:
        """A session's turn is near: load what tiers have of it; whether it is held for that now."""
        if sequence.is_looked_up or not self._connector.names:
            return False
        return self._scheduler.kv.fits(sequence, sequence.num_tokens) and self.loads.look_up(
            sequence
        )

    # ---- the engine's loop

    @property
    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """What is done about each kind of event."""
        return {LoadDone: self._load_done, StoreDone: self._store_done, AskDone: self._ask_done}

    @property
    def is_busy(self) -> bool:
        """Whether blocks of the pool are read from, or written to, by a mover of tiers."""
        return bool(self.loads.num_open or self.stores.num_open)

    def reclaim(self) -> bool:
        """See Lender.reclaim: the last load ends, with what has come."""
        return self.loads.reclaim()

    @property
    def is_lending(self) -> bool:
        """See Lender.is_lending: what only stores keep from being used comes back when it is written."""
        return self._pool.num_lent > 0

    def before_step(self) -> None:
        """Sequences whose turn is near are looked up."""
        if self._connector.names:
            self.loads.expire()
            self.loads.look_ahead()

    def after_step(self, num_tokens: int = 0, num_samples: int = 0, seconds: float = 0.0) -> None:
        """What a step has committed goes down. Its size and time, where there was one, tell what computing costs."""
        if num_tokens - num_samples >= _LEAST_TOKENS_TO_LEARN:
            self.loads.note_step(num_tokens, seconds)
        self.stores.look()

    def held_blocks(self) -> Iterator[list[BlockId]]:
        """Blocks of the pool that loads hold, for each of them."""
        yield from self.loads.held_blocks()

    def reset(self) -> None:
        """Drop what is not in use in the pool and in tiers of our own, and what was known of a shared one.

        What is on its way in either direction is given up: nothing from before comes back.
        """
        self.loads.drop()
        self.stores.reset()
        self._pool.reset_prefix_cache()
        self._connector.clear()

    def close(self) -> None:
        """End the movers and let go of the tiers. Idempotent."""
        self._connector.close()

    # ---- telling

    def take_events(self) -> list[CacheEvent]:
        """What became found or vanished in tiers of our own since the last call, in order."""
        events = [
            CacheEvent(EventKind.STORED, name, self._names.hashes(keys))
            for name, keys in self._restored.items()
            if keys
        ]
        self._restored = {}
        changed = self._connector.take_changes()
        for name, changes in changed.items():
            events += self._events_of(name, changes)
        for changes in changed.values():
            for change in changes:
                for key in change.keys if change.kind is EventKind.REMOVED else ():
                    self._names.forget_unless(key, self._connector)
        return events

    def published(self) -> dict[Tier, list[BlockHash]]:
        """Every block that readers may know of, in each tier of our own."""
        return {
            name: list(self._names.hashes(keys)) for name, keys in self._connector.held().items()
        }

    def stats(self) -> list[TierStats]:
        """Figures of each tier."""
        return [self._stats_of(name) for name in self._connector.names]

    # ---- inside

    def _events_of(self, name: Tier, changes: list[TierChange]) -> list[CacheEvent]:
        if not len(self._connector.tier(name)):
            return [CacheEvent(EventKind.CLEARED, name)]  # whatever came and went before
        return [
            CacheEvent(change.kind, name, hashes)
            for change in changes
            if (hashes := self._names.hashes(change.keys))
        ]

    def _load_done(self, event: LoadDone) -> None:
        self._connector.load_done(event)
        self.loads.load_done(event)

    def _store_done(self, event: StoreDone) -> None:
        self._connector.store_done(event)
        self.stores.done(event)

    def _ask_done(self, event: AskDone) -> None:
        self._connector.ask_done(event)
        self.loads.ask_done(event)

    def _stats_of(self, name: Tier) -> TierStats:
        tier, seconds = self._connector.tier(name), self._connector.seconds(name)
        return TierStats(
            tier=name,
            num_blocks=len(tier),
            capacity_blocks=tier.num_slots,
            block_bytes=tier.block_bytes,
            waiting_store_blocks=self._connector.num_waiting_blocks(name),
            **asdict(tier.counters),
            load_seconds_total=seconds.load_seconds_total,
            store_seconds_total=seconds.store_seconds_total,
            policy=tier.figures(),
        )
