"""All KV blocks of one rank: who holds them, in which order they are reused, and what they are known to hold.

State and generation of a block live in one place, `core.blocks.BlockLife`, which movers see too. The pool adds what
only the engine thread needs: reference counts, the free queue and the map from content to blocks.

    in the free queue   FREE (no content) or CACHED (content findable), no references; passed over while lent to a mover
    held                RESERVED, FILLING or COMMITTED, one reference a table that names it
    set aside           QUARANTINED: given up while a writer was inside; back to the free queue by `settle`
    null block          FREE for ever, in no queue, so that no permit for it can be granted

Order of reuse: blocks without content first (they stand at the head), then content by age of its last use. A sequence
releases its blocks tail first and acquires its whole prefix, so a child is always evicted before its parent and what
is findable stays prefix-closed.

Engine thread only. Never touches the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from core.block_hash import BlockHash
from core.blocks import BlockLife, BlockState
from core.events import CacheEvent
from core.ids import NULL_BLOCK, BlockId
from engine.kvcache.beginnings import Beginnings
from engine.kvcache.chain import BlockContent
from engine.kvcache.event_log import EventLog
from engine.kvcache.free_queue import FreeQueue


class HeldContent(NamedTuple):
    """A block and what it holds."""

    block: BlockId
    group: int
    content: BlockContent


class BlockPool:
    """Allocates, shares, commits, evicts and finds blocks.

    life: states, generations and writers of the same blocks.
    num_groups: KV groups that draw from this pool; content is looked up by group.
    published_group: the group whose blocks are told to the index, None for none.
    """

    def __init__(
        self,
        life: BlockLife,
        *,
        num_groups: int = 1,
        published_group: int | None = 0,
        events_with_token_ids: bool = False,
    ) -> None:
        num_blocks = len(life)
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none beside the null block"
        self.life = life
        self.num_usable = num_blocks - 1
        self.num_ever_used = 1
        """Blocks from the first on, the null block included, beyond which none has ever been used."""
        self._published_group = published_group
        self._references = [0] * num_blocks
        self._lent: dict[BlockId, int] = {}
        self._num_lent_queued = 0
        self._queue = FreeQueue(num_blocks)
        self._quarantined: set[BlockId] = set()
        self._content: dict[BlockId, tuple[int, BlockContent]] = {}
        self._copies: list[dict[BlockHash, list[BlockId]]] = [{} for _ in range(num_groups)]
        self._beginnings = [Beginnings() for _ in range(num_groups)]
        self._events = EventLog(with_token_ids=events_with_token_ids)
        self._committed: list[BlockId] | None = None

    # ---- what there is

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those with findable content included."""
        return len(self._queue) - self._num_lent_queued

    @property
    def num_lent(self) -> int:
        """Blocks that could be allocated if no mover read them."""
        return self._num_lent_queued

    @property
    def num_quarantined(self) -> int:
        """Blocks given up with a writer still inside."""
        return len(self._quarantined)

    @property
    def num_held(self) -> int:
        """Blocks with a reference."""
        return self.num_usable - len(self._queue) - len(self._quarantined)

    @property
    def usage(self) -> float:
        """Share of the allocatable blocks that are not free, in [0, 1]."""
        return 1.0 - self.num_free / self.num_usable

    def references(self, block: BlockId) -> int:
        """Tables that name the block."""
        return self._references[block]

    def free_order(self) -> list[BlockId]:
        """The free queue, next to be taken first."""
        return list(self._queue)

    # ---- references

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Take blocks from the head of the queue, RESERVED, one reference each; all of them or None."""
        if num_blocks > self.num_free:
            return None
        return [self._take() for _ in range(num_blocks)]

    def acquire(self, block: BlockId) -> None:
        """One more reference; cached content comes out of the queue and back into use."""
        if self._references[block] == 0:
            self._queue.remove(block)
            self._num_lent_queued -= block in self._lent
            self.life.touch(block)
        self._references[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """One reference less on each, in order (a sequence: tail first).

        A block that nobody holds any more keeps its content at the tail of the queue if it has any; else it is
        given up: to the head of the queue, the first one foremost, or aside while a writer is inside.
        """
        emptied: list[BlockId] = []
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is released more often than held"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self.life.state(block) is BlockState.COMMITTED:
                self.life.rest(block)
                self._queue.append(block)
                self._num_lent_queued += block in self._lent
            elif self.life.abort(block) is BlockState.FREE:
                emptied.append(block)
            else:
                self._quarantined.add(block)
        self._queue.prepend(emptied)

    def lend(self, block: BlockId) -> None:
        """A mover reads a committed or cached block: until as many `take_back`s it is not allocated anew.

        No reference, and no use: the block keeps its place in the order of eviction, where it is passed over.
        """
        assert block in self._content, f"block {block} has no content to be read"
        self._lent[block] = self._lent.get(block, 0) + 1
        self._num_lent_queued += self._lent[block] == 1 and block in self._queue

    def take_back(self, block: BlockId) -> None:
        """A mover is done with a block of a `lend`."""
        self._lent[block] -= 1
        if not self._lent[block]:
            del self._lent[block]
            self._num_lent_queued -= block in self._queue

    def settle(self, block: BlockId) -> bool:
        """Take a block back from quarantine if its last writer has left; whether that happened."""
        if not self.life.settle(block):
            return False
        self._quarantined.remove(block)
        self._queue.prepend([block])
        return True

    def settle_all(self) -> int:
        """Try to take back every quarantined block; how many came."""
        return sum([self.settle(block) for block in sorted(self._quarantined)])

    # ---- content

    def begin_fill(self, block: BlockId) -> None:
        """The first write into a held block is about to happen, or has."""
        self.life.begin_fill(block)

    def commit(self, block: BlockId, content: BlockContent, group: int = 0) -> None:
        """Every slot of a FILLING block is written and verified: from now on its content is found.

        Several blocks may hold equal content (two sequences computed it at once); block ids under a running
        sequence never change, so they stay several.
        """
        self.life.commit(block)
        self._content[block] = (group, content)
        copies = self._copies[group].setdefault(content.key, [])
        copies.append(block)
        if len(copies) == 1:
            self._beginnings[group].add(content)
            if group == self._published_group:
                self._events.stored(content)
        if self._committed is not None:
            self._committed.append(block)

    def note_committed(self) -> None:
        """From now on remember what is committed, for `take_committed`."""
        self._committed = []

    def take_committed(self) -> list[HeldContent]:
        """What was committed since the last call and is still there, oldest first."""
        if not self._committed:
            return []
        blocks, self._committed = self._committed, []
        return [
            HeldContent(b, *self._content[b]) for b in dict.fromkeys(blocks) if b in self._content
        ]

    def holds(self, held: HeldContent) -> bool:
        """Whether a block still holds what it held."""
        return self._content.get(held.block) == (held.group, held.content)

    def next_evicted(self, num_blocks: int) -> list[HeldContent]:
        """What would be lost with the next `num_blocks` allocations, first one first."""
        blocks = islice(self._queue, num_blocks)
        return [HeldContent(b, *self._content[b]) for b in blocks if b in self._content]

    def match(self, contents: Iterable[BlockContent], group: int = 0) -> list[BlockId]:
        """Blocks that hold the longest findable head of a chain. Takes no reference.

        Stored token ids and parent are compared: equal hashes alone are not believed.
        """
        found: list[BlockId] = []
        copies = self._copies[group]
        for content in contents:
            blocks = copies.get(content.key)
            if not blocks or self._content[blocks[0]][1] != content:
                break
            found.append(blocks[0])
        return found

    def match_beginning(
        self, parent: BlockHash, token_ids: Sequence[int], group: int = 0
    ) -> tuple[BlockId, int]:
        """A block behind `parent` whose first tokens are `token_ids`' first ones, and how many.

        NULL_BLOCK and 0 where there is none. Takes no reference. token_ids: at least one. Equal hashes alone are not
        believed, as in `match`.
        """
        content, count = self._beginnings[group].longest(parent, token_ids)
        for block in self._copies[group].get(content.key, ()) if content else ():
            if self._content[block][1] == content:
                return block, count
        return NULL_BLOCK, 0

    def num_cached_among(self, blocks: Iterable[BlockId]) -> int:
        """By how many fewer blocks could be allocated if these were acquired: those lent can not be allocated now."""
        return sum([self._references[block] == 0 and block not in self._lent for block in blocks])

    def reset_prefix_cache(self) -> int:
        """Forget all content that nobody uses; how many blocks that were."""
        cached = [block for block in self._queue if block in self._content]
        for block in cached:
            self.life.evict(block)
            self._forget(block)
        if cached and not self._content:
            self._events.cleared()
        return len(cached)

    def snapshot(self) -> list[BlockHash]:
        """Every published hash, as it stands after all events taken so far and those still to take."""
        if self._published_group is None:
            return []
        copies = self._copies[self._published_group]
        return [name for blocks in copies.values() for name in self._content[blocks[0]][1].hashes]

    def take_events(self) -> list[CacheEvent]:
        """What became findable or vanished since the last call, in order."""
        return self._events.take()

    # ---- checks

    def check_integrity(self, tables: Sequence[Iterable[BlockId]] | None = None) -> None:
        """Raise AssertionError with the reason if the pool contradicts itself or, when given, its holders.

        tables: for every holder the blocks it has a reference on, with repetition.
        """
        self._queue.check_integrity()
        for index in range(1, self.num_usable + 1):
            self.check_block(BlockId(index))
        assert self.life.state(NULL_BLOCK) is BlockState.FREE, "the null block is in use"
        assert NULL_BLOCK not in self._content, "the null block has content"
        self._check_copies()
        lent = sum(block in self._queue for block in self._lent)
        assert lent == self._num_lent_queued, f"{lent} blocks lent, {self._num_lent_queued} counted"
        if tables is not None:
            self._check_references(tables)

    def check_block(self, block: BlockId) -> None:
        """Raise AssertionError with the reason if what is known of one block contradicts itself. Constant time."""
        state, held = self.life.state(block), self._references[block] > 0
        name = f"block {block} ({state.name}, {self._references[block]} references)"
        queued, aside = block in self._queue, block in self._quarantined
        assert held + queued + aside == 1, f"{name} is held {held}, queued {queued}, aside {aside}"
        places = {
            BlockState.FREE: queued,
            BlockState.CACHED: queued,
            BlockState.QUARANTINED: aside,
            BlockState.RESERVED: held,
            BlockState.FILLING: held,
            BlockState.COMMITTED: held,
        }
        assert places[state], f"{name} is in the wrong place"
        has_content = state in (BlockState.COMMITTED, BlockState.CACHED)
        assert has_content == (block in self._content), f"{name}: content {block in self._content}"
        if has_content:
            group, content = self._content[block]
            listed = self._copies[group].get(content.key, ())
            assert block in listed, f"{name} is not found by its hash"
        self._queue.check_block(block)
        if self.life.num_writers(block):
            writable = (BlockState.RESERVED, BlockState.FILLING, BlockState.QUARANTINED)
            assert state in writable, f"{name} has a writer inside"

    def _check_copies(self) -> None:
        listed = 0
        for group, copies in enumerate(self._copies):
            for key, blocks in copies.items():
                assert blocks, f"hash {key.hex()} has no block"
                listed += len(blocks)
                for block in blocks:
                    owner, content = self._content[block]
                    assert (owner, content.key) == (group, key), (
                        f"block {block} is under a wrong hash"
                    )
        assert listed == len(self._content), (
            f"{listed} findable blocks, {len(self._content)} contents"
        )
        for group, copies in enumerate(self._copies):
            found = len(self._beginnings[group])
            assert found == len(copies), f"{found} beginnings, {len(copies)} hashes"

    def _check_references(self, tables: Sequence[Iterable[BlockId]]) -> None:
        expected = [0] * len(self._references)
        for table in tables:
            for block in table:
                expected[block] += 1
        for index, (ours, theirs) in enumerate(zip(self._references, expected, strict=True)):
            assert ours == theirs, f"block {index}: {ours} references, {theirs} holders"

    def _take(self) -> BlockId:
        if self._num_lent_queued:
            block = next(block for block in self._queue if block not in self._lent)
            self._queue.remove(block)
        else:
            block = self._queue.pop_head()
        if block in self._content:
            self.life.evict(block)
            self._forget(block)
        self.life.allocate(block)
        self.num_ever_used = max(self.num_ever_used, block + 1)
        self._references[block] = 1
        return block

    def _forget(self, block: BlockId) -> None:
        group, content = self._content.pop(block)
        copies = self._copies[group][content.key]
        copies.remove(block)
        if copies:
            return
        del self._copies[group][content.key]
        self._beginnings[group].remove(content.key)
        if group == self._published_group:
            self._events.removed(content)
