"""A block pool with a model beside it: every call goes to both, and the model predicts every answer.

The model is plain lists and dicts; it knows states, generations, references, the exact order of the free queue, what
is findable, and every event. It shares no code with the pool but the hashing of contents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from core.blocks import BlockLife, BlockState, Permit
from core.events import EventKind
from core.ids import BlockId, SessionId
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.chain import BlockContent
from tests.support.kv import chain_of

WRITABLE = {BlockState.RESERVED, BlockState.FILLING}
FINDABLE = {BlockState.COMMITTED, BlockState.CACHED}


@dataclass
class ModelBlock:
    """What the model believes of one block."""

    state: BlockState = BlockState.FREE
    generation: int = 0
    references: int = 0
    writers: int = 0
    content: BlockContent | None = None


@dataclass(eq=False)
class Holder:
    """A sequence: its blocks by position and the contents they are to have."""

    contents: list[BlockContent]
    blocks: list[BlockId]
    num_committed: int


@dataclass(eq=False)
class Grant:
    """A permit, the lives of the blocks it was given for, and whether it lives."""

    permit: Permit
    generations: dict[BlockId, int] = field(default_factory=dict)
    is_live: bool = True


class ModelledPool:
    """One pool, its holders, permits and writers, and what the model believes of them."""

    def __init__(self, num_usable: int) -> None:
        self.life = BlockLife(num_usable + 1)
        self.pool = BlockPool(self.life)
        self.blocks = {BlockId(i): ModelBlock() for i in range(1, num_usable + 1)}
        self.queue = list(self.blocks)
        self.holders: list[Holder] = []
        self.grants: list[Grant] = []
        self.writers: list[BlockId] = []
        self._copies: dict[BlockContent, list[BlockId]] = {}
        self._known: set[bytes] = set()
        self._parents: dict[bytes, bytes] = {}

    # ---- the engine thread: taking

    def begin(self, letters: list[int], max_matched: int, runs: bool) -> Holder | None:
        """Share what is cached of a chain, then allocate the rest; nothing at all if it does not fit."""
        contents = chain_of(*letters)
        self._parents |= {content.key: content.parent for content in contents}
        found = self._match(contents[:max_matched])
        assert self.pool.match(contents[:max_matched]) == found
        cached = [block for block in found if not self.blocks[block].references]
        assert self.pool.num_cached_among(found) == len(cached)
        num_fresh = len(contents) - len(found)
        if num_fresh + len(cached) > self.pool.num_free:
            return None
        for block in found:
            self.acquire(block)
        fresh = self.allocate(num_fresh)
        assert fresh is not None
        holder = Holder(contents, found + fresh, len(found))
        self.holders.append(holder)
        while runs and self.commit(holder):
            pass
        return holder

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        found = self.pool.allocate(num_blocks)
        if num_blocks > len(self.queue):
            assert found is None
            return None
        taken, self.queue = self.queue[:num_blocks], self.queue[num_blocks:]
        assert found == taken
        for block in taken:
            self.forget(block)
            model = self.blocks[block]
            model.state, model.references = BlockState.RESERVED, 1
            model.generation += 1
        return taken

    def acquire(self, block: BlockId) -> None:
        self.pool.acquire(block)
        model = self.blocks[block]
        if not model.references:
            self.queue.remove(block)
            model.state = BlockState.COMMITTED
        model.references += 1

    # ---- the engine thread: filling

    def begin_fill(self, block: BlockId) -> None:
        if self.blocks[block].state in WRITABLE:
            self.pool.begin_fill(block)
            self.blocks[block].state = BlockState.FILLING
        else:
            refused(lambda: self.pool.begin_fill(block))

    def commit(self, holder: Holder) -> bool:
        """Fill and commit the next block in order, if no writer is inside; whether it is committed now."""
        if holder.num_committed == len(holder.blocks):
            return False
        block = holder.blocks[holder.num_committed]
        content = holder.contents[holder.num_committed]
        model = self.blocks[block]
        if model.state is BlockState.COMMITTED:  # a fork committed it first
            holder.num_committed += 1
            return True
        if model.state is BlockState.RESERVED:
            refused(lambda: self.pool.commit(block, content))
            self.begin_fill(block)
        if model.writers:
            refused(lambda: self.pool.commit(block, content))
            return False
        self.pool.commit(block, content)
        model.state, model.content = BlockState.COMMITTED, content
        self._copies.setdefault(content, []).append(block)
        holder.num_committed += 1
        return True

    # ---- the engine thread: giving back

    def drop(self, holder: Holder, keep_first: int) -> None:
        """A holder releases its tail, and is gone when nothing is left."""
        dropped = holder.blocks[keep_first:]
        del holder.blocks[keep_first:]
        holder.num_committed = min(holder.num_committed, keep_first)
        if not holder.blocks:
            self.holders.remove(holder)
        self.release(dropped[::-1])

    def abandon(self, block: BlockId) -> None:
        """Every holder of a block drops it, and what follows it."""
        for holder in [holder for holder in self.holders if block in holder.blocks]:
            self.drop(holder, holder.blocks.index(block))

    def release(self, blocks: list[BlockId]) -> None:
        self.pool.release(blocks)
        emptied = []
        for block in blocks:
            model = self.blocks[block]
            model.references -= 1
            if model.references:
                continue
            if model.state is BlockState.COMMITTED:
                model.state = BlockState.CACHED
                self.queue.append(block)
            elif model.writers:
                model.state = BlockState.QUARANTINED
            else:
                model.state = BlockState.FREE
                emptied.append(block)
        self.queue = emptied + self.queue

    def settle(self, block: BlockId) -> None:
        model = self.blocks[block]
        settles = model.state is BlockState.QUARANTINED and not model.writers
        assert self.pool.settle(block) is settles
        if settles:
            model.state = BlockState.FREE
            self.queue.insert(0, block)

    def forget(self, block: BlockId) -> None:
        """The model only: a block's content is gone."""
        model = self.blocks[block]
        if model.content is not None:
            self._copies[model.content].remove(block)
        model.state, model.content = BlockState.FREE, None

    # ---- permits and movers

    def grant(self, holder: Holder) -> Grant | None:
        """A new attempt may write the holder's own blocks that are not full yet."""
        own = [b for b in holder.blocks if self.blocks[b].state in WRITABLE]
        own = [block for block in own if self.blocks[block].references == 1]
        if not own:
            return None
        permit = self.life.grant(SessionId(len(self.grants) + 1), 0, own)
        self.grants.append(Grant(permit, {b: self.blocks[b].generation for b in own}))
        return self.grants[-1]

    def enter(self, grant: Grant, block: BlockId) -> None:
        """In exactly when the permit lives and names this life of a block that is open. The null block never is."""
        model = self.blocks.get(block, ModelBlock())
        allowed = (
            grant.is_live
            and grant.generations.get(block) == model.generation
            and model.state in WRITABLE
        )
        assert self.life.enter(grant.permit, block) is allowed
        if allowed:
            model.writers += 1
            self.writers.append(block)

    def leave(self, block: BlockId, settles: bool) -> None:
        """A writer leaves; when it was the last of a quarantined block, the engine hears of it now or later."""
        self.writers.remove(block)
        model = self.blocks[block]
        model.writers -= 1
        is_last = not model.writers and model.state is BlockState.QUARANTINED
        assert self.life.leave(block) is is_last
        if is_last and settles:
            self.settle(block)

    # ---- checks

    def check_blocks(self) -> None:
        """Pool, life and model agree on every block, and no block is lost."""
        self.pool.check_integrity([holder.blocks for holder in self.holders])
        for block, model in self.blocks.items():
            assert self.life.state(block) is model.state
            assert self.life.generation(block) == model.generation
            assert self.life.num_writers(block) == model.writers
            assert self.pool.references(block) == model.references
        assert self.pool.free_order() == self.queue
        assert self.pool.num_free == len(self.queue)
        states = [model.state for model in self.blocks.values()]
        assert self.pool.num_quarantined == states.count(BlockState.QUARANTINED)
        assert self.pool.num_held == sum(model.references > 0 for model in self.blocks.values())
        homes = self.pool.num_free + self.pool.num_held + self.pool.num_quarantined
        assert homes == len(self.blocks)

    def check_events(self) -> None:
        """A reader of the events knows exactly what is findable, and what is findable is prefix-closed."""
        for event in self.pool.take_events():
            if event.kind is EventKind.STORED:
                assert not self._known & set(event.hashes), "stored twice"
                parents = [self._parents[name] for name in event.hashes]
                assert parents == [event.parent, *event.hashes[:-1]], "an event breaks its chain"
                self._known |= set(event.hashes)
            elif event.kind is EventKind.REMOVED:
                assert set(event.hashes) <= self._known, "removed what was not stored"
                self._known -= set(event.hashes)
            else:
                self._known.clear()
        contents = [m.content for m in self.blocks.values() if m.content is not None]
        assert all(m.content is not None for m in self.blocks.values() if m.state in FINDABLE)
        assert self._known == {content.key for content in contents}
        assert sorted(self.pool.snapshot()) == sorted(self._known)
        root = chain_of(0)[0].parent
        assert all(content.parent in self._known | {root} for content in contents)

    def _match(self, contents: list[BlockContent]) -> list[BlockId]:
        found: list[BlockId] = []
        for content in contents:
            if not self._copies.get(content):
                break
            found.append(self._copies[content][0])
        return found


def refused(call: Callable[[], object]) -> None:
    """A call that is no transition is refused, loudly."""
    with pytest.raises(AssertionError):
        call()
