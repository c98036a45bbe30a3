"""Random lives of blocks under permits and writers, against a model that is told nothing but the calls."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from core.blocks import BlockLife, BlockState, Permit
from core.ids import BlockId, SessionId

NUM_BLOCKS = 5
BLOCKS = st.integers(0, NUM_BLOCKS - 1).map(BlockId)
WRITABLE = {BlockState.RESERVED, BlockState.FILLING}


@dataclass(eq=False)
class Grant:
    """What the model knows of a permit: whether it lives, and which life of each block it was given for."""

    permit: Permit
    generations: dict[int, int]
    is_live: bool = True


class BlockLifeMachine(RuleBasedStateMachine):
    """Drives one BlockLife with legal engine calls and with any mover call at any time."""

    grants = Bundle("grants")
    writers = Bundle("writers")

    def __init__(self):
        super().__init__()
        self.life = BlockLife(NUM_BLOCKS)
        self.state = [BlockState.FREE] * NUM_BLOCKS
        self.generation = [0] * NUM_BLOCKS
        self.inside = [0] * NUM_BLOCKS
        self.num_sessions = 0
        self.num_live = 0

    def in_state(self, *states):
        return [BlockId(b) for b in range(NUM_BLOCKS) if self.state[b] in states]

    # ---- the engine thread

    @precondition(lambda self: self.in_state(BlockState.FREE))
    @rule(data=st.data())
    def allocate(self, data):
        block = data.draw(st.sampled_from(self.in_state(BlockState.FREE)))
        self.generation[block] += 1
        assert self.life.allocate(block) == self.generation[block]
        self.state[block] = BlockState.RESERVED

    @precondition(lambda self: self.in_state(*WRITABLE))
    @rule(data=st.data())
    def begin_fill(self, data):
        block = data.draw(st.sampled_from(self.in_state(*WRITABLE)))
        self.life.begin_fill(block)
        self.state[block] = BlockState.FILLING

    @precondition(lambda self: self.in_state(BlockState.FILLING))
    @rule(data=st.data())
    def commit(self, data):
        block = data.draw(st.sampled_from(self.in_state(BlockState.FILLING)))
        if self.inside[block]:
            self.refused(lambda: self.life.commit(block))
        else:
            self.life.commit(block)
            self.state[block] = BlockState.COMMITTED

    @precondition(lambda self: self.in_state(BlockState.COMMITTED, BlockState.CACHED))
    @rule(data=st.data(), evicts=st.booleans())
    def rest_touch_or_evict(self, data, evicts):
        choices = self.in_state(BlockState.COMMITTED, BlockState.CACHED)
        block = data.draw(st.sampled_from(choices))
        if self.state[block] is BlockState.COMMITTED:
            self.life.rest(block)
            self.state[block] = BlockState.CACHED
        elif evicts:
            self.life.evict(block)
            self.state[block] = BlockState.FREE
        else:
            self.life.touch(block)
            self.state[block] = BlockState.COMMITTED

    @rule(block=BLOCKS)
    def abort(self, block):
        if self.state[block] is BlockState.FREE:
            self.refused(lambda: self.life.abort(block))
            return
        after = BlockState.QUARANTINED if self.inside[block] else BlockState.FREE
        assert self.life.abort(block) is after
        self.state[block] = after

    @rule(block=BLOCKS)
    def settle(self, block):
        settles = self.state[block] is BlockState.QUARANTINED and not self.inside[block]
        assert self.life.settle(block) is settles
        if settles:
            self.state[block] = BlockState.FREE

    @precondition(lambda self: self.in_state(*WRITABLE))
    @rule(target=grants, data=st.data())
    def grant(self, data):
        choices = st.sampled_from(self.in_state(*WRITABLE))
        blocks = data.draw(st.lists(choices, min_size=1, unique=True))
        self.num_sessions += 1
        self.num_live += 1
        permit = self.life.grant(SessionId(self.num_sessions), 0, blocks)
        return Grant(permit, {block: self.generation[block] for block in blocks})

    @rule(grant=grants)
    def revoke(self, grant):
        self.life.revoke(grant.permit)
        self.num_live -= grant.is_live
        grant.is_live = False

    # ---- movers

    @rule(target=writers, grant=grants, block=BLOCKS)
    def enter(self, grant, block):
        """A writer gets in exactly when its permit lives, names this life of the block, and the block is open."""
        allowed = (
            grant.is_live
            and grant.generations.get(block) == self.generation[block]
            and self.state[block] in WRITABLE
        )
        assert self.life.enter(grant.permit, block) is allowed
        self.inside[block] += allowed
        return block if allowed else multiple()

    @rule(block=consumes(writers))
    def leave(self, block):
        self.inside[block] -= 1
        last = not self.inside[block] and self.state[block] is BlockState.QUARANTINED
        assert self.life.leave(block) is last

    # ---- always

    @invariant()
    def life_and_model_agree(self):
        blocks = [BlockId(block) for block in range(NUM_BLOCKS)]
        assert [self.life.state(block) for block in blocks] == self.state
        assert [self.life.generation(block) for block in blocks] == self.generation
        assert [self.life.num_writers(block) for block in blocks] == self.inside
        assert self.life.num_live_permits == self.num_live

    @invariant()
    def writers_are_only_in_blocks_that_cannot_be_reused(self):
        for block in range(NUM_BLOCKS):
            if self.life.num_writers(BlockId(block)):
                allowed = {*WRITABLE, BlockState.QUARANTINED}
                assert self.life.state(BlockId(block)) in allowed

    def refused(self, call):
        try:
            call()
        except AssertionError:
            return
        raise RuntimeError("an illegal call was accepted")


TestBlockLifeMachine = BlockLifeMachine.TestCase
TestBlockLifeMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
