"""The bookkeeping that tiers share: which key is in which slot, who uses it, and what leaves for what.

A slot is taken exactly while its key is resident in the policy, so the policy's capacity is the tier's:

    WRITING   pinned by its store; not found
    HELD      found; pinned once a reader
    DROPPED   damaged or given up while in use; not found, and free when the last user is done
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from core.events import EventKind
from kvtransfer.tiers.base import (
    BlockKey,
    Placement,
    StorePlan,
    Tier,
    TierChange,
    TierCounters,
)
from kvtransfer.tiers.frequency import DECAY_USES, FrequencyFilter
from kvtransfer.tiers.policies import EvictionPolicy, make_policy


class _State(Enum):
    WRITING = auto()
    HELD = auto()
    DROPPED = auto()


@dataclass(slots=True)
class _Entry:
    """One slot in use. num_users: its store, or its readers."""

    slot: int
    state: _State
    num_users: int


class SlottedTier(Tier):
    """A tier of `num_slots` equal slots, without the bytes."""

    def __init__(
        self,
        block_bytes: int,
        num_slots: int,
        policy: str,
        min_frequency: int = 0,
        decay_uses: int = DECAY_USES,
    ) -> None:
        """min_frequency, decay_uses: what a block's uses must come to for it to be stored, see FrequencyFilter."""
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self.counters = TierCounters()
        self._policy: EvictionPolicy[BlockKey] = make_policy(policy, num_slots)
        # As many keys as blocks held and ghosts: what is used less often than those is cold.
        self._uses: FrequencyFilter[BlockKey] | None = None
        if min_frequency:
            self._uses = FrequencyFilter(min_frequency, max(1024, 2 * num_slots), decay_uses)
        self._entries: dict[BlockKey, _Entry] = {}
        self._num_fresh = num_slots  # slots never used: the last ones
        self._freed: list[int] = []
        self._changes: list[TierChange] = []

    # ---- what is there

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_pinned(self) -> int:
        """Slots that a mover may be using."""
        return self._policy.num_pinned

    def lookup(self, chain: Sequence[BlockKey]) -> int:
        """See Tier.lookup."""
        return self._num_held(chain)

    def keys(self) -> list[BlockKey]:
        """See Tier.keys."""
        return [key for key, entry in self._entries.items() if entry.state is _State.HELD]

    def ask(self, chain: Sequence[BlockKey]) -> int:
        """See Tier.ask: `lookup` knows all that is in a tier of our own."""
        return 0

    def note_found(self, keys: Sequence[BlockKey]) -> None:
        """See Tier.note_found: nothing is found that is not known."""
        assert not keys, f"{len(keys)} blocks found in a tier of our own"

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """See Tier.touch. Where frequency decides, it counts as a use of every block, held or not."""
        self._policy.touch(chain)
        if self._uses is not None:
            for key in chain:
                self._uses.use(key)

    def figures(self) -> dict[str, float]:
        """See Tier.figures."""
        return self._policy.figures()

    def take_changes(self) -> list[TierChange]:
        """See Tier.take_changes."""
        taken, self._changes = self._changes, []
        return taken

    # ---- loads

    def prepare_load(self, keys: Sequence[BlockKey]) -> list[Placement] | None:
        """See Tier.prepare_load."""
        if self._num_held(keys) < len(keys):
            return None
        self._policy.pin(keys)
        placements = []
        for key in keys:
            entry = self._entries[key]
            entry.num_users += 1
            placements.append(Placement(key, entry.slot))
        return placements

    def complete_load(
        self,
        placements: Sequence[Placement],
        damaged: Collection[Placement] = (),
        unread: Collection[Placement] = (),
    ) -> None:
        """See Tier.complete_load."""
        for placement in damaged:
            assert placement in placements, f"{placement} is damaged and was not loaded"
            self.counters.damaged_blocks_total += self._drop(placement.key)
        self.counters.loaded_blocks_total += len(placements) - len(damaged) - len(unread)
        for placement in placements:
            entry = self._entry_of(placement, _State.HELD, _State.DROPPED)
            assert entry.num_users, f"{placement} is completed more often than prepared"
            entry.num_users -= 1
        self._policy.unpin([placement.key for placement in placements])
        self._free_dropped(placements)

    # ---- stores

    def prepare_store(self, chain: Sequence[BlockKey]) -> StorePlan | None:
        """See Tier.prepare_store."""
        absent = [key for key in dict.fromkeys(chain) if key not in self._entries]
        wanted = [key for key in absent if self._admits(key)]
        self.counters.unadmitted_blocks_total += len(absent) - len(wanted)
        if not wanted:
            return StorePlan((), ())
        evicted = self._policy.admit(wanted, {key for key in chain if key in self._entries})
        if evicted is None:
            self.counters.refused_stores_total += 1
            return None
        self._freed += [self._entries.pop(key).slot for key in evicted]
        self._tell(EventKind.REMOVED, evicted)
        self.counters.evicted_blocks_total += len(evicted)
        return StorePlan(tuple(map(self._place, wanted)), tuple(evicted))

    def complete_store(self, placements: Sequence[Placement], ok: bool) -> None:
        """See Tier.complete_store."""
        for placement in placements:
            entry = self._entry_of(placement, _State.WRITING, _State.DROPPED)
            entry.num_users = 0
            if not ok:
                entry.state = _State.DROPPED
            elif entry.state is _State.WRITING:
                entry.state = _State.HELD
        keys = [placement.key for placement in placements]
        self._policy.unpin(keys)
        held = [key for key in keys if self._entries[key].state is _State.HELD]
        self._tell(EventKind.STORED, held)
        self.counters.stored_blocks_total += len(held)
        self.counters.failed_blocks_total += 0 if ok else len(placements)
        self._free_dropped(placements)

    def clear(self) -> None:
        """See Tier.clear."""
        for key, entry in list(self._entries.items()):
            self._drop(key)
            if not entry.num_users:
                self._release(key)
        self._erase_all()

    # ---- what a tier may fill in

    def _admits(self, key: BlockKey) -> bool:
        """Whether a block is worth a slot."""
        return self._uses is None or self._uses.passes(key)

    def _erase(self, slot: int) -> None:
        """Nobody may find what is in this slot any more, after a restart either."""

    def _erase_all(self) -> None:
        """`_erase` every slot."""

    # ---- inside

    def _num_held(self, chain: Sequence[BlockKey]) -> int:
        """`lookup` by the books alone."""
        for position, key in enumerate(chain):
            entry = self._entries.get(key)
            if entry is None or entry.state is not _State.HELD:
                return position
        return len(chain)

    def _restore(self, placements: Iterable[Placement]) -> None:
        """Blocks that an earlier process left, oldest first, in a tier that has held nothing yet. No change is told."""
        taken = set()
        for key, slot in placements:
            left = self._policy.admit([key])
            assert left == [], "more blocks than slots"
            self._policy.unpin([key])
            self._entries[key] = _Entry(slot, _State.HELD, 0)
            taken.add(slot)
        last = max(taken, default=-1)
        self._num_fresh = self.num_slots - last - 1
        self._freed = [slot for slot in range(last, -1, -1) if slot not in taken]

    def _place(self, key: BlockKey) -> Placement:
        if self._num_fresh:
            slot = self.num_slots - self._num_fresh
            self._num_fresh -= 1
        else:
            slot = self._freed.pop()
        self._entries[key] = _Entry(slot, _State.WRITING, 1)
        return Placement(key, slot)

    def _entry_of(self, placement: Placement, *states: _State) -> _Entry:
        entry = self._entries.get(placement.key)
        assert entry is not None, f"{placement} is not prepared"
        assert entry.slot == placement.slot, f"{placement} is in slot {entry.slot}"
        assert entry.state in states, f"{placement} is {entry.state.name}"
        return entry

    def _drop(self, key: BlockKey) -> bool:
        """A block is not found any more, its slot stays taken; whether it was found until now."""
        entry = self._entries[key]
        was_held = entry.state is _State.HELD
        if was_held:
            self._tell(EventKind.REMOVED, [key])
        entry.state = _State.DROPPED
        return was_held

    def _free_dropped(self, placements: Sequence[Placement]) -> None:
        for key, slot in placements:
            entry = self._entries[key]
            if entry.state is _State.DROPPED and not entry.num_users:
                self._erase(slot)  # a store that was given up may have written all the same
                self._release(key)

    def _release(self, key: BlockKey) -> None:
        self._policy.discard(key)
        self._freed.append(self._entries.pop(key).slot)

    def _tell(self, kind: EventKind, keys: Sequence[BlockKey]) -> None:
        if keys:
            self._changes.append(TierChange(kind, tuple(keys)))
