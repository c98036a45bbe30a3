"""What every tier promises: a bounded store of whole KV blocks below the device pool.

A block is `block_bytes` bytes under a BlockKey; a tier holds at most `num_slots` of them, each in a slot. Calls come
in pairs, and bytes move between the two halves of a pair:

    engine thread                         mover thread
    plan = prepare_store(chain)     ->    write(placement, bytes), for each of plan.placements
    complete_store(placements, ok)  <-
    n = lookup(chain)
    placements = prepare_load(...)  ->    read(placement, buffer), for each
    complete_load(placements, ...)  <-

- Bookkeeping is the engine thread's alone. `read` and `write` run on any thread, touch bytes only, and may run side by
  side: a slot has one writer or any number of readers, never both.
- A block is found from `complete_store(..., ok=True)` on, so a reader never sees half of one. Between the halves of a
  pair a slot is pinned: it is neither evicted nor used anew, however long the mover takes.
- All or nothing: a store takes slots for all of its blocks or for none, and evicts nothing if it cannot.
- A digest (XXH3-128) is taken when a block is written and compared when it is read. A block that reads otherwise, or
  not at all, is a miss: it is dropped and counted, and never an error of the request.

Life of a key: absent -prepare_store-> being written -complete_store-> held -evicted or damaged-> absent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.block_hash import BlockHash
from core.events import EventKind


class BlockKey(NamedTuple):
    """Names the content of one block of one KV group.

    hash: the hash of the block and of all before it.
    group: the KV group's place in the layout.
    """

    hash: BlockHash
    group: int = 0


class Placement(NamedTuple):
    """Where one block's bytes are, or are to be."""

    key: BlockKey
    slot: int


class StorePlan(NamedTuple):
    """What a store is to do.

    placements: the blocks to be written, in the order they were asked for; those held already are left out.
    evicted: the keys that left for them, first one first.
    """

    placements: tuple[Placement, ...]
    evicted: tuple[BlockKey, ...]


class TierChange(NamedTuple):
    """What became found or vanished.

    kind: STORED or REMOVED. keys: in the order it happened.
    """

    kind: EventKind
    keys: tuple[BlockKey, ...]


@dataclass(slots=True)
class TierCounters:
    """Counters since the start. A reader on another thread may see a value one event old.

    stored_blocks_total, loaded_blocks_total: blocks written and now found; blocks read and verified.
    evicted_blocks_total: blocks that left for others.
    refused_stores_total: stores for which no room could be made, because too much was in use.
    unadmitted_blocks_total: blocks that were not used often enough to be stored.
    failed_blocks_total: blocks whose write failed.
    damaged_blocks_total: blocks that did not read as they were written, or not at all.
    foreign_blocks_total: blocks found at the start that were written for other KV.
    """

    stored_blocks_total: int = 0
    loaded_blocks_total: int = 0
    evicted_blocks_total: int = 0
    refused_stores_total: int = 0
    unadmitted_blocks_total: int = 0
    failed_blocks_total: int = 0
    damaged_blocks_total: int = 0
    foreign_blocks_total: int = 0


class Tier(ABC):
    """A bounded store of blocks. Engine thread, except for `ask`, `expect`, `read` and `write`."""

    block_bytes: int
    num_slots: int
    counters: TierCounters
    is_shared: bool = False
    """Whether other workers add blocks too: then `ask` may know more than `lookup`, and no changes are published."""

    # ---- what is there

    @abstractmethod
    def __len__(self) -> int:
        """Slots in use: blocks held or being written."""

    @abstractmethod
    def lookup(self, chain: Sequence[BlockKey]) -> int:
        """How many leading blocks of a chain are held. A hint: nothing is pinned, no use is counted."""

    @abstractmethod
    def keys(self) -> list[BlockKey]:
        """Every block that is held, in no order that means anything."""

    @abstractmethod
    def ask(self, chain: Sequence[BlockKey]) -> int:
        """How many leading blocks of a chain a shared store has. Any thread; may wait for a network, within a bound."""

    @abstractmethod
    def note_found(self, keys: Sequence[BlockKey]) -> None:
        """`ask` has found these: they are held from now on, as far as there is room to know of them."""

    @abstractmethod
    def touch(self, chain: Sequence[BlockKey]) -> None:
        """A request uses a chain, whether or not it reads it from here; once a request, when it begins."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """What the eviction policy says of itself, by name."""

    @abstractmethod
    def take_changes(self) -> list[TierChange]:
        """What became found or vanished since the last call, in order."""

    # ---- pairs

    @abstractmethod
    def prepare_load(self, keys: Sequence[BlockKey]) -> list[Placement] | None:
        """Pin blocks and say where they are, in the order asked for; None, with nothing pinned, if one is not held."""

    @abstractmethod
    def complete_load(
        self,
        placements: Sequence[Placement],
        damaged: Collection[Placement] = (),
        unread: Collection[Placement] = (),
    ) -> None:
        """The mover is done with blocks of a `prepare_load`.

        damaged, unread: those of them that `read` denied, and that were not read because nobody wanted them any more.
        """

    @abstractmethod
    def prepare_store(self, chain: Sequence[BlockKey]) -> StorePlan | None:
        """Slots for those blocks of a chain that are to be stored; None, with nothing changed, if there is no room.

        A block held, or being written, is not stored again, and no block of the chain is evicted for another one.
        The plan is empty where there is nothing to do.
        """

    @abstractmethod
    def complete_store(self, placements: Sequence[Placement], ok: bool) -> None:
        """The mover is done with some or all blocks of a plan: they are found from now on, or their slots are free."""

    @abstractmethod
    def clear(self) -> None:
        """Give up every block; those in use at once for lookups, and their slots when the movers are done."""

    @abstractmethod
    def close(self) -> None:
        """Let go of memory and files. No mover is at work any more. Idempotent."""

    # ---- bytes, any thread

    @abstractmethod
    def write(self, placement: Placement, block: memoryview) -> None:
        """Put a block's bytes into its slot. Raises OSError where they cannot all be written.

        block: `block_bytes` bytes, final: a tier that outlives the process may find them from here on, whatever
        `complete_store` would have said. Call only between prepare_store and complete_store.
        """

    def expect(self, placements: Sequence[Placement]) -> None:  # noqa: B027 - most tiers have nothing to prepare
        """These are read next, in order: what can be fetched ahead may be. Between prepare_load and complete_load."""

    @abstractmethod
    def read(self, placement: Placement, block: memoryview) -> bool:
        """Fill `block` from a slot; whether it holds what was written. Where not, its content means nothing.

        block: `block_bytes` writable bytes. Call only between prepare_load and complete_load.
        """
