"""The remote tier: what this worker knows to be in the store that a fleet shares, and how it gets there and back.

A slot is knowledge, not memory: a block is held here because this worker stored it, or because it asked the store and
was told (`ask`, then `note_found`). Either may be wrong by the time it is read: the store, or the worker that stored a
block, drops what it wants when it wants. Then the block is a miss.

    engine thread      bookkeeping, as in every tier; never the network
    mover thread       `read` and `write`; what is to leave the store leaves it before the next block goes in
    any thread         `ask`

Bytes: what this worker has added to the store and not deleted is never more than `capacity_bytes`, headers included,
because its blocks, with those that wait to be deleted, are never more than slots when one is added. Blocks of others
take slots and no bytes. What a worker that ended has left there goes by the store's own rules (for a Redis: it
expires).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence

from core.errors import ConfigError
from kvtransfer.tiers.base import BlockKey, Placement, StorePlan, TierChange
from kvtransfer.tiers.fingerprint import FINGERPRINT_BYTES
from kvtransfer.tiers.policies import DEFAULT_POLICY
from kvtransfer.tiers.remote.store import BlockStore, Fetch
from kvtransfer.tiers.remote.value import HEADER_BYTES, header_of, name_of
from kvtransfer.tiers.slotted import SlottedTier


class RemoteTier(SlottedTier):
    """Slots that stand for blocks in a shared store, which is the tier's from here on.

    capacity_bytes: what this worker adds to the store at most.
    block_bytes: bytes of a block.
    fingerprint: what the bytes belong to (kvtransfer/tiers/fingerprint.py).
    Raises ConfigError where not one block fits.

    found_blocks_total, missing_blocks_total: blocks that others had stored and that were found by asking; blocks that
    were not there, or the store was away, when they were to be read.
    """

    is_shared = True

    def __init__(
        self,
        store: BlockStore,
        capacity_bytes: int,
        block_bytes: int,
        fingerprint: bytes,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        assert len(fingerprint) == FINGERPRINT_BYTES, f"a fingerprint of {len(fingerprint)} bytes"
        num_slots = capacity_bytes // (HEADER_BYTES + block_bytes)
        if num_slots < 1:
            raise ConfigError(
                f"remote tier: {capacity_bytes} bytes hold no block of {block_bytes} bytes"
            )
        super().__init__(block_bytes, num_slots, policy)
        self.store = store
        self.found_blocks_total = 0
        self.missing_blocks_total = 0
        self._fingerprint = fingerprint
        # Blocks that this worker added: those that are held; those that it knows no more, left in the store.
        self._own: set[BlockKey] = set()
        self._left: dict[BlockKey, None] = {}
        # What movers say of slots: whether a write added a block, how a read failed.
        self._is_added = bytearray(num_slots)
        self._failed_reads: dict[int, Fetch] = {}
        # To be deleted from the store, first one first; shared with movers.
        self._doomed: dict[BlockKey, None] = {}
        self._doomed_lock = threading.Lock()
        self._deleting = threading.Lock()

    # ---- any thread

    def ask(self, chain: Sequence[BlockKey]) -> int:
        """See Tier.ask: a round trip or a few; 0 while the store is away."""
        return self.store.count_leading([self._name(key) for key in chain])

    # ---- engine thread

    def note_found(self, keys: Sequence[BlockKey]) -> None:
        """See Tier.note_found. Others leave for them; where too much is in use for that, the first ones are noted."""
        fitting = self._fitting(list(dict.fromkeys(keys)))
        plan = super().prepare_store(fitting)
        assert plan is not None, "there was room"
        found = [placement.key for placement in plan.placements]
        self._own |= {key for key in found if self._reprieve(key)}
        self._part_with(plan.evicted)
        super().complete_store(plan.placements, ok=True)
        self.counters.stored_blocks_total -= len(found)  # nothing was written
        self.found_blocks_total += len(found)

    def lookup(self, chain: Sequence[BlockKey]) -> int:
        """See Tier.lookup. Nothing is found while the store is away, and it is found again afterwards."""
        return 0 if self.store.is_away else super().lookup(chain)

    def take_changes(self) -> list[TierChange]:
        """See Tier.take_changes. Not for an index: a block in the store is everybody's, and workers ask for it."""
        return super().take_changes()

    def figures(self) -> dict[str, float]:
        """See Tier.figures; and what the store has to say."""
        return super().figures() | {
            "found_blocks_total": self.found_blocks_total,
            "missing_blocks_total": self.missing_blocks_total,
            "store_failures_total": self.store.counters.failures_total,
            "store_outages_total": self.store.counters.outages_total,
            "store_refusals_total": self.store.counters.refusals_total,
            "store_is_away": float(self.store.is_away),
        }

    def complete_load(
        self,
        placements: Sequence[Placement],
        damaged: Collection[Placement] = (),
        unread: Collection[Placement] = (),
    ) -> None:
        """See Tier.complete_load. A block that is not there (any more) is dropped and is no damage."""
        for key, slot in damaged:
            fetched = self._failed_reads.pop(slot, None)
            if fetched is Fetch.AWAY and key in self._own:
                self._left[key] = None  # to be found again when the store is back
            if fetched is not None:
                self._own.discard(key)  # or there is nothing to delete, or it is on its way out
            if fetched in (Fetch.ABSENT, Fetch.AWAY):
                self.missing_blocks_total += self._drop(key)
        super().complete_load(placements, damaged, unread)

    def prepare_store(self, chain: Sequence[BlockKey]) -> StorePlan | None:
        """See Tier.prepare_store. Nothing is stored while the store is away or full."""
        if self.store.is_away or self.store.is_full:
            absent = {key for key in chain if key not in self._entries}
            self.counters.unadmitted_blocks_total += len(absent)
            return StorePlan((), ())
        plan = super().prepare_store(chain)
        if plan is not None:
            self._part_with(plan.evicted)
            self._make_way(plan.placements)
        return plan

    def complete_store(self, placements: Sequence[Placement], ok: bool) -> None:
        """See Tier.complete_store."""
        for key, slot in placements:
            if self._is_added[slot]:
                self._is_added[slot] = 0
                self._own.add(key)
        super().complete_store(placements, ok)

    def clear(self) -> None:
        """See Tier.clear. The store keeps the blocks: it is not this worker's to erase."""
        self._left.update(dict.fromkeys(self._own))
        self._own.clear()
        super().clear()

    def close(self) -> None:
        """See Tier.close. What this worker stored stays for others; what is to be deleted is, if that can be done."""
        try:
            self._delete_doomed()
        except OSError:
            pass  # it expires
        self.store.close()

    # ---- bytes, any thread

    def write(self, placement: Placement, block: memoryview) -> None:
        """See Tier.write. A block that the store has already is not sent, and not this worker's to delete."""
        assert len(block) == self.block_bytes, f"{len(block)} bytes of a block"
        self._delete_doomed()
        name = self._name(placement.key)
        header = header_of(name, block)
        self._is_added[placement.slot] = 1  # also where the store's answer is lost
        is_added = self.store.put(name, (memoryview(header), block))
        self._is_added[placement.slot] = is_added

    def read(self, placement: Placement, block: memoryview) -> bool:
        """See Tier.read. What is wrong is deleted from the store, so that nobody reads it again."""
        assert len(block) == self.block_bytes, f"{len(block)} bytes for a block"
        name = self._name(placement.key)
        header = bytearray(HEADER_BYTES)
        fetched = self.store.get_into(name, (memoryview(header), block))
        if fetched is Fetch.WHOLE and header != header_of(name, block):
            fetched = Fetch.WRONG
        if fetched is Fetch.WHOLE:
            return True
        self._failed_reads.setdefault(placement.slot, fetched)
        if fetched is Fetch.WRONG:
            self._doom([placement.key])
            try:
                self._delete_doomed()
            except OSError:
                pass  # the next write tries again
        return False

    # ---- inside

    def _name(self, key: BlockKey) -> str:
        return name_of(self._fingerprint, key)

    def _fitting(self, keys: list[BlockKey]) -> list[BlockKey]:
        """Those keys that are held, and as many others, first ones first, as there is room for beside them."""
        entries = [self._entries.get(key) for key in keys]
        num_kept = sum(1 for entry in entries if entry is not None and not entry.num_users)
        num_room = self.num_slots - len(self._entries) + self._policy.num_evictable - num_kept
        fitting = []
        for key, entry in zip(keys, entries, strict=True):
            num_room -= entry is None
            if entry is not None or num_room >= 0:
                fitting.append(key)
        return fitting

    def _release(self, key: BlockKey) -> None:
        self._failed_reads.pop(self._entries[key].slot, None)
        super()._release(key)
        self._part_with([key])

    def _part_with(self, keys: Iterable[BlockKey]) -> None:
        """Blocks are not held any more: those that this worker added are to be deleted."""
        own = [key for key in keys if key in self._own]
        self._own.difference_update(own)
        self._doom(own)

    def _make_way(self, placements: Sequence[Placement]) -> None:
        """Of what is left in the store, delete what would be written anew, and what is too much with the rest."""
        if not self._left:
            return
        again = [key for key, _ in placements if key in self._left]
        for key in again:
            del self._left[key]
        num_over = len(self._entries) + len(self._left) - self.num_slots
        oldest = list(self._left)[: max(0, num_over)]
        for key in oldest:
            del self._left[key]
        self._doom(again + oldest)

    def _doom(self, keys: Iterable[BlockKey]) -> None:
        with self._doomed_lock:
            self._doomed.update(dict.fromkeys(keys))

    def _reprieve(self, key: BlockKey) -> bool:
        """A block was found that is known here; whether this worker added it."""
        if key in self._left:
            del self._left[key]
            return True
        with self._doomed_lock:
            was_doomed = key in self._doomed
            self._doomed.pop(key, None)
        return was_doomed

    def _delete_doomed(self) -> None:
        """Delete from the store what is to leave it. Raises OSError; then it is still to leave."""
        if not self._doomed:
            return
        with self._deleting:
            with self._doomed_lock:
                keys = list(self._doomed)
            self.store.delete([self._name(key) for key in keys])
            with self._doomed_lock:
                for key in keys:
                    self._doomed.pop(key, None)
