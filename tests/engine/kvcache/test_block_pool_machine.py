"""Random lives of a pool's blocks: sharing, forks, commits, eviction, aborts with writers inside, late movers."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from core.blocks import BlockState
from core.ids import NULL_BLOCK, BlockId
from tests.support.modelled_pool import Grant, Holder, ModelledPool, refused

LETTERS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
"""Chains over two letters: equal heads are the rule, not the exception."""

holding = precondition(lambda self: self.both.holders)
granted = precondition(lambda self: self.both.grants)
written = precondition(lambda self: self.both.writers)


class BlockPoolMachine(RuleBasedStateMachine):
    """Any legal engine call and any mover call, at any time, on a pool and on its model."""

    @initialize(num_usable=st.integers(2, 7))
    def build(self, num_usable: int) -> None:
        self.both = ModelledPool(num_usable)

    # ---- the engine thread

    @rule(letters=LETTERS, max_matched=st.integers(0, 4), runs=st.booleans())
    def start(self, letters: list[int], max_matched: int, runs: bool) -> None:
        self.both.begin(letters, max_matched, runs)

    @rule(first=LETTERS, second=LETTERS, ends=st.booleans())
    def run_two(self, first: list[int], second: list[int], ends: bool) -> None:
        """Two chains computed at once, none sharing what the other has: equal heads become two copies."""
        for holder in [self.both.begin(first, 0, True), self.both.begin(second, 0, True)]:
            if holder is not None and ends:
                self.both.drop(holder, 0)

    @rule(num_blocks=st.integers(0, 9))
    def allocate_all_or_none(self, num_blocks: int) -> None:
        """Blocks taken and given straight back: what had content loses it, and nothing else changes."""
        blocks = self.both.allocate(num_blocks)
        if blocks:
            self.both.release(blocks)

    @holding
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Share all blocks, a tail that is not full included; a fork begins where all before it is committed."""
        holder = self.draw_holder(data)
        while holder.num_committed < len(holder.blocks) - 1:
            if not self.both.commit(holder):
                return
        for block in holder.blocks:
            self.both.acquire(block)
        twin = Holder(holder.contents, list(holder.blocks), holder.num_committed)
        self.both.holders.append(twin)

    @holding
    @rule(data=st.data())
    def copy_shared_tail(self, data: st.DataObject) -> None:
        """The first to write a block that is not committed and not its alone takes a fresh one in its place."""
        holder = self.draw_holder(data)
        if holder.num_committed == len(holder.blocks):
            return
        shared = holder.blocks[holder.num_committed]
        if self.both.blocks[shared].references < 2:
            return
        fresh = self.both.allocate(1)
        if fresh is not None:
            holder.blocks[holder.num_committed] = fresh[0]
            self.both.release([shared])

    @holding
    @rule(data=st.data(), num_blocks=st.integers(1, 4))
    def commit_next(self, data: st.DataObject, num_blocks: int) -> None:
        holder = self.draw_holder(data)
        for _ in range(num_blocks):
            if not self.both.commit(holder):
                return

    @holding
    @rule(data=st.data())
    def begin_fill(self, data: st.DataObject) -> None:
        self.both.begin_fill(data.draw(st.sampled_from(self.draw_holder(data).blocks)))

    @holding
    @rule(data=st.data(), keep_first=st.integers(0, 3))
    def release_tail(self, data: st.DataObject, keep_first: int) -> None:
        self.both.drop(self.draw_holder(data), keep_first)

    @rule(data=st.data())
    def release_unheld(self, data: st.DataObject) -> None:
        """A double free is refused and changes nothing; so is a free of the null block."""
        unheld = [block for block, model in self.both.blocks.items() if not model.references]
        block = data.draw(st.sampled_from([NULL_BLOCK, *unheld]))
        refused(lambda: self.both.pool.release([block]))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.both.settle(data.draw(st.sampled_from(self.prefer(BlockState.QUARANTINED))))

    @rule()
    def reset_prefix_cache(self) -> None:
        is_cached = {
            block: model.state is BlockState.CACHED for block, model in self.both.blocks.items()
        }
        assert self.both.pool.reset_prefix_cache() == sum(is_cached.values())
        for block in filter(is_cached.get, list(self.both.queue)):
            self.both.forget(block)

    # ---- permits and movers

    @holding
    @rule(data=st.data(), num_entered=st.integers(0, 2))
    def grant(self, data: st.DataObject, num_entered: int) -> None:
        """A new attempt, whose movers may go straight in."""
        grant = self.both.grant(self.draw_holder(data))
        for block in list(grant.generations)[:num_entered] if grant else ():
            self.both.enter(grant, block)

    @granted
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        grant = self.draw_grant(data)
        self.both.life.revoke(grant.permit)
        grant.is_live = False

    @granted
    @rule(data=st.data())
    def enter_granted(self, data: st.DataObject) -> None:
        grant = self.draw_grant(data)
        self.both.enter(grant, data.draw(st.sampled_from(sorted(grant.generations))))

    @granted
    @rule(data=st.data())
    def enter_anywhere(self, data: st.DataObject) -> None:
        grant = self.draw_grant(data)
        self.both.enter(grant, data.draw(st.sampled_from([NULL_BLOCK, *self.both.blocks])))

    @granted
    @rule(data=st.data(), letters=LETTERS)
    def come_late(self, data: st.DataObject, letters: list[int]) -> None:
        """A permit's blocks are given up and begin another life; a mover that nobody told comes to write."""
        grant = self.draw_grant(data)
        for block in grant.generations:
            self.both.abandon(block)
        self.both.begin(letters, 0, False)
        for block in grant.generations:
            self.both.enter(grant, block)

    @written
    @rule(data=st.data(), drains=st.booleans())
    def abort_under_writer(self, data: st.DataObject, drains: bool) -> None:
        """Whoever holds a block that is being written gives it up, with all that follows."""
        block = data.draw(st.sampled_from(self.both.writers))
        self.both.abandon(block)
        while drains and block in self.both.writers:
            self.both.leave(block, settles=True)

    @written
    @rule(data=st.data(), settles=st.booleans())
    def leave(self, data: st.DataObject, settles: bool) -> None:
        self.both.leave(data.draw(st.sampled_from(self.both.writers)), settles)

    # ---- always

    @invariant()
    def blocks_are_as_predicted(self) -> None:
        self.both.check_blocks()

    @invariant()
    def events_tell_what_is_findable(self) -> None:
        self.both.check_events()

    # ---- drawing

    def draw_holder(self, data: st.DataObject) -> Holder:
        return data.draw(st.sampled_from(self.both.holders))

    def draw_grant(self, data: st.DataObject) -> Grant:
        return data.draw(st.sampled_from(self.both.grants))

    def prefer(self, state: BlockState) -> list[BlockId]:
        """The blocks in a state, or all when there are none."""
        there = [block for block, model in self.both.blocks.items() if model.state is state]
        return there or list(self.both.blocks)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
