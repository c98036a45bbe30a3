"""KV on its way from the pool to the tiers.

Eager: blocks go as they are committed. Lazy: blocks go when few allocations stand between them and eviction. Either
way a block is lent until every mover that reads it is done, so its bytes cannot change under a mover.
What a tier has no room for yet waits its turn, unpinned: it is stored if it is still there then. A chain that is
used again is offered again. Engine thread only; never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from core.events import Tier
from core.ids import BlockId
from engine.kvcache.block_pool import BlockPool, HeldContent
from engine.kvcache.chain import BlockContent
from engine.kvcache.storage import Storage
from engine.offload.names import BlockNames
from kvtransfer.tiers.base import BlockKey
from kvtransfer.tiers.connector import KVConnector
from kvtransfer.tiers.mover import StoreDone


class StoreSide:
    """The stores of one engine; see the module.

    lazy_blocks: so many blocks at the head of the free queue are kept safe in tiers; 0 stores eagerly.
    """

    def __init__(
        self,
        connector: KVConnector,
        pool: BlockPool,
        storage: Storage,
        names: BlockNames,
        lazy_blocks: int = 0,
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._storage = storage
        self._names = names
        self._block_bytes = storage.layout.block_bytes
        self._lazy_blocks = lazy_blocks
        self._near: dict[BlockId, BlockContent] = {}
        self._waiting: dict[Tier, dict[BlockKey, HeldContent]] = {n: {} for n in connector.names}
        self._reading: dict[int, dict[BlockKey, BlockId]] = {}
        if connector.names and not lazy_blocks:
            pool.note_committed()

    @property
    def is_lazy(self) -> bool:
        """Whether only what is about to be evicted goes down."""
        return bool(self._lazy_blocks)

    @property
    def num_open(self) -> int:
        """Stores that movers have not answered."""
        return len(self._reading)

    def look(self) -> None:
        """Send down what is new, or about to be lost, and what has waited."""
        if not self._waiting:
            return
        self.offer(self._near_eviction() if self._lazy_blocks else self._pool.take_committed())

    def offer(self, contents: Sequence[HeldContent]) -> None:
        """Store in every tier what it lacks of these, chain by chain, behind what waits already."""
        for name, waiting in self._waiting.items():
            for held in contents:
                key = BlockKey(held.content.key, held.group)
                if not self._connector.has(name, key):
                    waiting[key] = held
            while len(waiting) > self._pool.num_usable:
                del waiting[next(iter(waiting))]
            if waiting and (room := self._connector.room(name)):
                self._store_some(name, waiting, room)

    def done(self, event: StoreDone) -> None:
        """A mover reads these blocks no more."""
        reading = self._reading[event.job]
        for placement in event.placements:
            self._pool.take_back(reading.pop(placement.key))
            if not event.ok:
                self._names.forget_unless(placement.key, self._connector)
        if not reading:
            del self._reading[event.job]

    def reset(self) -> None:
        """Nothing of what waits goes down."""
        for waiting in self._waiting.values():
            waiting.clear()

    def _near_eviction(self) -> list[HeldContent]:
        """What has come near eviction since the last look. Once is enough: a tier may have refused or lost it since."""
        near = self._pool.next_evicted(self._lazy_blocks)
        new = [held for held in near if self._near.get(held.block) != held.content]
        self._near = {held.block: held.content for held in near}
        return new

    def _store_some(self, name: Tier, waiting: dict[BlockKey, HeldContent], room: int) -> None:
        """Those that wait longest, as many as there is room for, and are still in the pool."""
        chosen: list[HeldContent] = []
        while waiting and len(chosen) < room:
            held = waiting.pop(next(iter(waiting)))
            if self._pool.holds(held):
                chosen.append(held)
        for run in _chains(chosen):
            self._store(name, {BlockKey(held.content.key, held.group): held for held in run})

    def _store(self, name: Tier, held: dict[BlockKey, HeldContent]) -> None:
        placements = self._connector.plan_store(name, list(held))
        if not placements:
            return
        is_published = name in self._connector.own_names
        reading = {placement.key: held[placement.key].block for placement in placements}
        for key, block in reading.items():
            self._pool.lend(block)
            if is_published:
                self._names.note(held[key].content)
        self._bring_out(reading)
        job = self._connector.new_job()
        self._reading[job] = reading
        self._connector.store(name, job, placements, [self._bytes_of(b) for b in reading.values()])

    def _bring_out(self, reading: dict[BlockKey, BlockId]) -> None:
        """Where kernels use another memory than movers, copy the blocks to the latter."""
        for group, spec in enumerate(self._storage.layout.groups):
            ids = [block for key, block in reading.items() if key.group == group]
            if ids:
                self._storage.bring_out(group, ids, 0, len(spec.layers))

    def _bytes_of(self, block: BlockId) -> memoryview:
        return self._storage.buffer[block * self._block_bytes : (block + 1) * self._block_bytes]


def _chains(contents: Iterable[HeldContent]) -> Iterator[list[HeldContent]]:
    """Neighbours that continue each other, together: so a store never evicts a block for its own child."""
    run: list[HeldContent] = []
    for held in contents:
        if run and held.content.parent != run[-1].content.key and held.content != run[-1].content:
            yield run
            run = []
        run.append(held)
    if run:
        yield run
