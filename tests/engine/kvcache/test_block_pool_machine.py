"""Random lives of a pool's blocks under sharing, forks, eviction, permits and writers, against a model beside it.

The model is told the calls and predicts everything: states, generations, references, the exact order of the free
queue, what is findable, and every event. It is plain lists and dicts, and shares no code with the pool but the
hashing of contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from core.blocks import BlockLife, BlockState, Permit
from core.events import EventKind
from core.ids import NULL_BLOCK, BlockId, SessionId
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.chain import BlockContent
from tests.support.kv import chain_of

WRITABLE = {BlockState.RESERVED, BlockState.FILLING}
FINDABLE = {BlockState.COMMITTED, BlockState.CACHED}
LETTERS = st.lists(st.integers(0, 1), min_size=1, max_size=4)

holding = precondition(lambda self: self.holders)
granted = precondition(lambda self: self.grants)


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


class BlockPoolMachine(RuleBasedStateMachine):
    """Any legal engine call and any mover call, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[Holder] = []
        self.grants: list[Grant] = []
        self.writers: list[BlockId] = []
        self.copies: dict[BlockContent, list[BlockId]] = {}
        self.known: set[bytes] = set()
        self.parents: dict[bytes, bytes] = {}

    @initialize(num_usable=st.integers(2, 7))
    def build(self, num_usable: int) -> None:
        self.life = BlockLife(num_usable + 1)
        self.pool = BlockPool(self.life)
        self.blocks = {BlockId(i): ModelBlock() for i in range(1, num_usable + 1)}
        self.queue = list(self.blocks)

    # ---- the engine thread: taking

    @rule(letters=LETTERS, max_matched=st.integers(0, 4), runs=st.booleans())
    def start(self, letters: list[int], max_matched: int, runs: bool) -> None:
        self.begin(letters, max_matched, runs)

    @rule(first=LETTERS, second=LETTERS, ends=st.booleans())
    def run_two(self, first: list[int], second: list[int], ends: bool) -> None:
        """Two chains computed at once, none sharing what the other has: equal heads become two copies."""
        holders = [self.begin(first, 0, True), self.begin(second, 0, True)]
        for holder in holders:
            if holder is not None and ends:
                self.drop(holder, 0)

    @rule(num_blocks=st.integers(0, 9))
    def allocate_all_or_none(self, num_blocks: int) -> None:
        """Blocks taken and given straight back: what had content loses it, and nothing else changes."""
        blocks = self.allocate(num_blocks)
        if blocks:
            self.release(blocks)

    @holding
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Share all blocks, a tail that is not full included; a fork begins where everything before it is committed."""
        holder = self.draw_holder(data)
        while holder.num_committed < len(holder.blocks) - 1:
            if not self.commit(holder):
                return
        for block in holder.blocks:
            self.acquire(block)
        self.holders.append(Holder(holder.contents, list(holder.blocks), holder.num_committed))

    @holding
    @rule(data=st.data())
    def copy_shared_block(self, data: st.DataObject) -> None:
        """The first to write a block that is not committed and not its alone takes a fresh one in its place."""
        holder = self.draw_holder(data)
        if holder.num_committed == len(holder.blocks):
            return
        shared = holder.blocks[holder.num_committed]
        if self.blocks[shared].references < 2:
            return
        fresh = self.allocate(1)
        if fresh is not None:
            holder.blocks[holder.num_committed] = fresh[0]
            self.release([shared])

    # ---- the engine thread: filling

    @holding
    @rule(data=st.data(), num_blocks=st.integers(1, 4))
    def commit_next(self, data: st.DataObject, num_blocks: int) -> None:
        holder = self.draw_holder(data)
        for _ in range(num_blocks):
            if not self.commit(holder):
                return

    @holding
    @rule(data=st.data())
    def begin_fill(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.draw_holder(data).blocks))
        if self.blocks[block].state in WRITABLE:
            self.pool.begin_fill(block)
            self.blocks[block].state = BlockState.FILLING
        else:
            self.refused(lambda: self.pool.begin_fill(block))

    # ---- the engine thread: giving back

    @holding
    @rule(data=st.data(), keep_first=st.integers(0, 3))
    def release_tail(self, data: st.DataObject, keep_first: int) -> None:
        self.drop(self.draw_holder(data), keep_first)

    @rule(data=st.data())
    def release_unheld(self, data: st.DataObject) -> None:
        """A double free is refused and changes nothing; so is a free of the null block."""
        unheld = [block for block, model in self.blocks.items() if not model.references]
        block = data.draw(st.sampled_from([NULL_BLOCK, *unheld]))
        self.refused(lambda: self.pool.release([block]))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.settle_block(data.draw(st.sampled_from(self.prefer(BlockState.QUARANTINED))))

    @rule()
    def reset_prefix_cache(self) -> None:
        cached = [block for block in self.queue if self.blocks[block].state is BlockState.CACHED]
        assert self.pool.reset_prefix_cache() == len(cached)
        for block in cached:
            self.forget(block)

    # ---- permits and movers

    @holding
    @rule(data=st.data(), num_entered=st.integers(0, 2))
    def grant(self, data: st.DataObject, num_entered: int) -> None:
        """A new attempt may write the holder's own blocks that are not full yet; its writers go straight in."""
        holder = self.draw_holder(data)
        own = [b for b in holder.blocks if self.blocks[b].state in WRITABLE]
        own = [block for block in own if self.blocks[block].references == 1]
        if not own:
            return
        permit = self.life.grant(SessionId(len(self.grants) + 1), 0, own)
        lives = {block: self.blocks[block].generation for block in own}
        self.grants.append(Grant(permit, lives))
        for block in own[:num_entered]:
            self.enter(self.grants[-1], block)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), drains=st.booleans())
    def abort_under_writer(self, data: st.DataObject, drains: bool) -> None:
        """Whoever holds a block that is being written gives it up, with all that follows."""
        block = data.draw(st.sampled_from(self.writers))
        self.abandon(block)
        while drains and block in self.writers:
            self.depart(block, settles=True)

    @granted
    @rule(data=st.data(), letters=LETTERS)
    def come_late(self, data: st.DataObject, letters: list[int]) -> None:
        """The blocks of a permit are given up and begin another life; its mover, which nobody told, comes to write."""
        grant = data.draw(st.sampled_from(self.grants))
        for block in grant.generations:
            self.abandon(block)
        self.begin(letters, 0, False)
        for block in grant.generations:
            self.enter(grant, block)

    @granted
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        self.life.revoke(grant.permit)
        grant.is_live = False

    @granted
    @rule(data=st.data())
    def enter_granted(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        self.enter(grant, data.draw(st.sampled_from(sorted(grant.generations))))

    @granted
    @rule(data=st.data())
    def enter_anywhere(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        self.enter(grant, data.draw(st.sampled_from([NULL_BLOCK, *self.blocks])))

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), settles=st.booleans())
    def leave(self, data: st.DataObject, settles: bool) -> None:
        self.depart(data.draw(st.sampled_from(self.writers)), settles)

    # ---- always

    @invariant()
    def pool_is_whole(self) -> None:
        self.pool.check_integrity([holder.blocks for holder in self.holders])

    @invariant()
    def pool_and_model_agree(self) -> None:
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

    @invariant()
    def no_block_is_lost(self) -> None:
        homes = self.pool.num_free + self.pool.num_held + self.pool.num_quarantined
        assert homes == len(self.blocks)

    @invariant()
    def events_tell_what_is_findable(self) -> None:
        for event in self.pool.take_events():
            if event.kind is EventKind.STORED:
                assert not self.known & set(event.hashes), "stored twice"
                parents = [self.parents[name] for name in event.hashes]
                assert parents == [event.parent, *event.hashes[:-1]], "an event breaks its chain"
                self.known |= set(event.hashes)
            elif event.kind is EventKind.REMOVED:
                assert set(event.hashes) <= self.known, "removed what was not stored"
                self.known -= set(event.hashes)
            else:
                self.known.clear()
        contents = {m.content for m in self.blocks.values() if m.state in FINDABLE}
        assert self.known == {name for c in contents if c for name in c.hashes}
        assert sorted(self.pool.snapshot()) == sorted(self.known)

    @invariant()
    def what_is_findable_is_prefix_closed(self) -> None:
        contents = {m.content for m in self.blocks.values() if m.content is not None}
        keys = {content.key for content in contents}
        head = chain_of(0)[0].parent
        assert all(content.parent in keys or content.parent == head for content in contents)

    # ---- the model

    def draw_holder(self, data: st.DataObject) -> Holder:
        return data.draw(st.sampled_from(self.holders))

    def prefer(self, state: BlockState) -> list[BlockId]:
        """The blocks in a state, or all when there are none."""
        there = [block for block, model in self.blocks.items() if model.state is state]
        return there or list(self.blocks)

    def begin(self, letters: list[int], max_matched: int, runs: bool) -> Holder | None:
        """Share what is cached of a chain, then allocate the rest; nothing at all if it does not fit."""
        contents = chain_of(*letters)
        self.parents |= {content.key: content.parent for content in contents}
        expected = self.model_match(contents[:max_matched])
        found = self.pool.match(contents[:max_matched])
        assert found == expected
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

    def drop(self, holder: Holder, keep_first: int) -> None:
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

    def depart(self, block: BlockId, settles: bool) -> None:
        """A writer leaves; when it was the last of a quarantined block, the engine hears of it at once or later."""
        self.writers.remove(block)
        model = self.blocks[block]
        model.writers -= 1
        is_last = not model.writers and model.state is BlockState.QUARANTINED
        assert self.life.leave(block) is is_last
        if is_last and settles:
            self.settle_block(block)

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
            self.refused(lambda: self.pool.commit(block, content))
            self.pool.begin_fill(block)
            model.state = BlockState.FILLING
        if model.writers:
            self.refused(lambda: self.pool.commit(block, content))
            return False
        self.pool.commit(block, content)
        model.state, model.content = BlockState.COMMITTED, content
        self.copies.setdefault(content, []).append(block)
        holder.num_committed += 1
        return True

    def settle_block(self, block: BlockId) -> None:
        model = self.blocks[block]
        settles = model.state is BlockState.QUARANTINED and not model.writers
        assert self.pool.settle(block) is settles
        if settles:
            model.state = BlockState.FREE
            self.queue.insert(0, block)

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

    def forget(self, block: BlockId) -> None:
        model = self.blocks[block]
        if model.content is not None:
            self.copies[model.content].remove(block)
        model.state, model.content = BlockState.FREE, None

    def model_match(self, contents: list[BlockContent]) -> list[BlockId]:
        found: list[BlockId] = []
        for content in contents:
            if not self.copies.get(content):
                break
            found.append(self.copies[content][0])
        return found

    def acquire(self, block: BlockId) -> None:
        self.pool.acquire(block)
        model = self.blocks[block]
        if not model.references:
            self.queue.remove(block)
            model.state = BlockState.COMMITTED
        model.references += 1

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

    def refused(self, call) -> None:
        with pytest.raises(AssertionError):
            call()


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
