"""Block life: every transition there is, every one there is not, and permits under threads."""

import sys
import threading

import pytest

from core.blocks import BlockLife, BlockState, Permit
from core.ids import BlockId, SessionId

FREE, RESERVED, FILLING, COMMITTED, CACHED, QUARANTINED = BlockState
BLOCK = BlockId(1)
SESSION = SessionId(77)


def make_life(state=FREE, num_blocks=4):
    """A life whose block 1 was brought to `state` by transitions alone; no writer inside, unless quarantined."""
    life = BlockLife(num_blocks)
    if state is FREE:
        return life
    life.allocate(BLOCK)
    if state is QUARANTINED:
        assert life.enter(life.grant(SESSION, 0, [BLOCK]), BLOCK)
        life.abort(BLOCK)
    if state in (FILLING, COMMITTED, CACHED):
        life.begin_fill(BLOCK)
    if state in (COMMITTED, CACHED):
        life.commit(BLOCK)
    if state is CACHED:
        life.rest(BLOCK)
    assert life.state(BLOCK) is state
    return life


# ---------------------------------------------------------------- transitions

LEGAL = {
    ("allocate", FREE): RESERVED,
    ("begin_fill", RESERVED): FILLING,
    ("begin_fill", FILLING): FILLING,
    ("commit", FILLING): COMMITTED,
    ("rest", COMMITTED): CACHED,
    ("touch", CACHED): COMMITTED,
    ("evict", CACHED): FREE,
    ("abort", RESERVED): FREE,
    ("abort", FILLING): FREE,
    ("abort", COMMITTED): FREE,
    ("abort", CACHED): FREE,
    ("abort", QUARANTINED): QUARANTINED,  # its writer is still inside
}
VERBS = ("allocate", "begin_fill", "commit", "rest", "touch", "evict", "abort")
ILLEGAL = [(verb, state) for verb in VERBS for state in BlockState if (verb, state) not in LEGAL]


@pytest.mark.parametrize(("step", "after"), LEGAL.items(), ids=lambda value: str(value))
def test_every_legal_transition(step, after):
    verb, before = step
    life = make_life(before)
    generation = life.generation(BLOCK)
    getattr(life, verb)(BLOCK)
    assert life.state(BLOCK) is after
    assert life.generation(BLOCK) == generation + (verb == "allocate")


@pytest.mark.parametrize(("verb", "state"), ILLEGAL)
def test_every_other_transition_is_our_mistake_and_changes_nothing(verb, state):
    life = make_life(state)
    generation = life.generation(BLOCK)
    with pytest.raises(AssertionError, match="block 1"):
        getattr(life, verb)(BLOCK)
    assert life.state(BLOCK) is state
    assert life.generation(BLOCK) == generation


def test_a_transition_touches_no_other_block():
    life = make_life(COMMITTED)
    assert [life.state(BlockId(block)) for block in (0, 2, 3)] == [FREE] * 3
    assert [life.generation(BlockId(block)) for block in (0, 2, 3)] == [0] * 3
    assert len(life) == 4


def test_each_allocation_is_a_new_generation():
    life = BlockLife(2)
    seen = []
    for _ in range(5):
        seen.append(life.allocate(BLOCK))
        life.abort(BLOCK)
    assert seen == [1, 2, 3, 4, 5]


def test_a_block_with_a_writer_inside_is_not_committed():
    life = make_life(FILLING)
    assert life.enter(life.grant(SESSION, 0, [BLOCK]), BLOCK)
    with pytest.raises(AssertionError, match="writer inside"):
        life.commit(BLOCK)
    assert life.state(BLOCK) is FILLING


# ---------------------------------------------------------------- permits


@pytest.mark.parametrize("state", [RESERVED, FILLING])
def test_a_permit_lets_its_holder_in_and_out(state):
    life = make_life(state)
    permit = life.grant(SESSION, 3, [BLOCK])
    assert (permit.session, permit.attempt) == (SESSION, 3)
    assert permit.generations == {BLOCK: life.generation(BLOCK)}
    assert life.enter(permit, BLOCK)
    assert life.enter(permit, BLOCK)
    assert life.num_writers(BLOCK) == 2
    assert life.leave(BLOCK) is False
    assert life.leave(BLOCK) is False
    assert life.num_writers(BLOCK) == 0


@pytest.mark.parametrize("state", [FREE, COMMITTED, CACHED, QUARANTINED])
def test_no_permit_for_a_block_that_is_not_being_written(state):
    life = make_life(state)
    live = life.num_live_permits
    with pytest.raises(AssertionError, match=f"which is {state.name}"):
        life.grant(SESSION, 0, [BLOCK])
    assert life.num_live_permits == live


def test_a_revoked_permit_lets_nobody_in():
    life = make_life(RESERVED)
    permit = life.grant(SESSION, 0, [BLOCK])
    life.revoke(permit)
    life.revoke(permit)
    assert life.enter(permit, BLOCK) is False
    assert life.num_writers(BLOCK) == 0
    assert life.num_live_permits == 0


def test_a_revoked_permit_does_not_take_another_attempts():
    life = make_life(RESERVED)
    first, second = (life.grant(SESSION, attempt, [BLOCK]) for attempt in (0, 1))
    life.revoke(first)
    assert not life.enter(first, BLOCK)
    assert life.enter(second, BLOCK)


def test_equal_looking_permits_are_different_rights():
    life = make_life(RESERVED)
    real = life.grant(SESSION, 0, [BLOCK])
    forged = Permit(SESSION, 0, dict(real.generations))
    assert not life.enter(forged, BLOCK)
    life.revoke(forged)
    assert life.enter(real, BLOCK)


def test_a_permit_is_for_its_blocks_only():
    life = make_life(RESERVED)
    permit = life.grant(SESSION, 0, [BLOCK])
    life.allocate(BlockId(2))
    assert not life.enter(permit, BlockId(2))


def test_a_permit_of_an_earlier_generation_opens_nothing():
    life = make_life(RESERVED)
    permit = life.grant(SESSION, 0, [BLOCK])
    life.abort(BLOCK)
    life.allocate(BLOCK)
    assert permit.generations[BLOCK] != life.generation(BLOCK)
    assert life.enter(permit, BLOCK) is False


@pytest.mark.parametrize("state", [COMMITTED, CACHED])
def test_a_live_permit_opens_no_finished_block(state):
    life = make_life(FILLING)
    permit = life.grant(SESSION, 0, [BLOCK])
    life.commit(BLOCK)
    if state is CACHED:
        life.rest(BLOCK)
    assert life.enter(permit, BLOCK) is False


def test_leaving_without_having_entered_is_our_mistake():
    with pytest.raises(AssertionError, match="leave without enter"):
        make_life(RESERVED).leave(BLOCK)


# ---------------------------------------------------------------- quarantine


def test_an_abort_with_writers_waits_for_the_last_one():
    life = make_life(FILLING)
    permit = life.grant(SESSION, 0, [BLOCK])
    assert life.enter(permit, BLOCK)
    assert life.enter(permit, BLOCK)
    life.revoke(permit)
    assert life.abort(BLOCK) is QUARANTINED
    assert life.settle(BLOCK) is False
    assert life.leave(BLOCK) is False  # one is still inside
    assert life.settle(BLOCK) is False
    assert life.leave(BLOCK) is True  # the last one is told
    assert life.state(BLOCK) is QUARANTINED  # only the engine thread changes states
    assert life.settle(BLOCK) is True
    assert life.settle(BLOCK) is False
    assert life.state(BLOCK) is FREE
    assert life.allocate(BLOCK) == 2


def test_a_live_permit_does_not_open_a_quarantined_block():
    life = make_life(FILLING)
    permit = life.grant(SESSION, 0, [BLOCK])
    assert life.enter(permit, BLOCK)
    life.abort(BLOCK)
    assert life.enter(permit, BLOCK) is False


@pytest.mark.parametrize("state", [FREE, RESERVED, FILLING, COMMITTED, CACHED])
def test_a_late_settle_changes_nothing(state):
    life = make_life(state)
    assert life.settle(BLOCK) is False
    assert life.state(BLOCK) is state


def test_a_second_abort_frees_a_quarantined_block_that_is_empty():
    life = make_life(QUARANTINED)
    assert life.leave(BLOCK) is True
    assert life.abort(BLOCK) is FREE
    assert life.settle(BLOCK) is False


def test_writers_of_a_dead_process_are_expelled():
    life = make_life(QUARANTINED)
    life.expel(BLOCK)
    assert life.num_writers(BLOCK) == 0
    assert life.settle(BLOCK) is True


# ---------------------------------------------------------------- threads


def test_movers_never_write_into_a_block_that_was_given_up():
    """Movers write their session's mark under permits while the engine gives blocks up and allocates them anew.

    A write that lands after the block went to another session would be a mark of the wrong session.
    """
    num_movers, rounds = 3, 400
    life = BlockLife(3)
    content = [0, 0, 0]
    blocks = [BlockId(1), BlockId(2)]
    current: list[tuple[Permit, int] | None] = [None]
    settled: list[BlockId] = []
    wrong: list[str] = []
    entries = [0] * num_movers
    done = threading.Event()

    def move(number):
        while not done.is_set():
            work = current[0]
            if work is None:
                continue
            permit, mark = work
            for block in blocks:
                if not life.enter(permit, block):
                    continue
                entries[number] += 1
                content[block] = mark
                if content[block] != mark or life.state(block) not in (RESERVED, QUARANTINED):
                    wrong.append(f"mark {mark} in block {block}: {content[block]}")
                if life.leave(block):
                    settled.append(block)

    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    movers = [threading.Thread(target=move, args=(number,)) for number in range(num_movers)]
    try:
        for mover in movers:
            mover.start()
        for mark in range(1, rounds + 1):
            for block in blocks:
                life.allocate(block)
            permit = life.grant(SessionId(mark), 0, blocks)
            current[0] = (permit, mark)
            entered = sum(entries)
            while sum(entries) < entered + 2 and not wrong:
                pass
            life.revoke(permit)
            for block in blocks:
                life.abort(block)
            for block in blocks:
                while life.state(block) is QUARANTINED:
                    life.settle(block)
                content[block] = 0
        current[0] = None
    finally:
        done.set()
        for mover in movers:
            mover.join()
        sys.setswitchinterval(switch_interval_s)
    assert not wrong
    assert content == [0, 0, 0]  # no write after the block was free
    assert [life.num_writers(block) for block in blocks] == [0, 0]
    assert life.num_live_permits == 0
    assert [life.generation(block) for block in blocks] == [rounds] * 2
    assert sum(entries) >= 2 * rounds


class StoppedAtStates(list):
    """The states of a life, which hold up one thread that reads them until it is told to go on."""

    def __init__(self, states):
        super().__init__(states)
        self.stopped_thread = None
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __getitem__(self, index):
        if threading.current_thread() is self.stopped_thread:
            self.reached.set()
            self.go_on.wait(timeout=10)
        return super().__getitem__(index)


@pytest.mark.parametrize("verb", ["abort", "revoke"])
def test_checking_a_permit_and_counting_the_writer_are_one_step(verb):
    """An abort or a revocation that comes between the two waits, and then sees the writer."""
    life = make_life(FILLING)
    permit = life.grant(SESSION, 0, [BLOCK])
    states = life._state = StoppedAtStates(life._state)
    calls = {"abort": lambda: life.abort(BLOCK), "revoke": lambda: life.revoke(permit)}
    mover = states.stopped_thread = threading.Thread(target=life.enter, args=(permit, BLOCK))
    engine = threading.Thread(target=calls[verb])
    mover.start()
    assert states.reached.wait(timeout=10)
    engine.start()
    engine.join(timeout=0.1)
    waits = engine.is_alive()
    states.go_on.set()
    for thread in (mover, engine):
        thread.join(timeout=10)
    assert waits
    assert life.num_writers(BLOCK) == 1
    assert life.state(BLOCK) is (QUARANTINED if verb == "abort" else FILLING)


def test_of_many_writers_exactly_the_last_out_is_told():
    num_threads = 8
    for _ in range(50):
        life = make_life(RESERVED)
        permit = life.grant(SESSION, 0, [BLOCK])
        inside, out = threading.Barrier(num_threads + 1), threading.Barrier(num_threads + 1)
        told = []

        def write(life=life, permit=permit, inside=inside, out=out, told=told):
            assert life.enter(permit, BLOCK)
            inside.wait()
            out.wait()
            if life.leave(BLOCK):
                told.append(threading.get_ident())

        writers = [threading.Thread(target=write) for _ in range(num_threads)]
        for writer in writers:
            writer.start()
        inside.wait()
        assert life.num_writers(BLOCK) == num_threads
        assert life.abort(BLOCK) is QUARANTINED
        out.wait()
        for writer in writers:
            writer.join()
        assert len(told) == 1
        assert life.settle(BLOCK) is True


# ---------------------------------------------------------------- several blocks at once


def test_several_are_entered_and_left_as_each_would_be():
    life = BlockLife(4)
    for block in map(BlockId, range(3)):
        life.allocate(block)
    permit = life.grant(SESSION, 0, [BlockId(0), BlockId(1), BlockId(2)])
    life.abort(BlockId(1))
    life.allocate(BlockId(1))  # another life, which the permit is not for
    blocks = [BlockId(block) for block in range(4)]
    assert life.enter_all(permit, blocks) == [True, False, True, False]
    assert [life.num_writers(block) for block in blocks] == [1, 0, 1, 0]
    assert life.abort(BlockId(2)) is QUARANTINED
    assert life.leave_all([BlockId(0), BlockId(2)]) == [BlockId(2)]
    assert life.settle(BlockId(2))
    life.revoke(permit)
    assert life.enter_all(permit, blocks) == [False] * 4
    with pytest.raises(AssertionError, match="leave without enter, block 0"):
        life.leave_all([BlockId(0)])


def test_generations_may_lie_elsewhere():
    elsewhere = [0, 0]
    life = BlockLife(2, elsewhere)
    life.allocate(BLOCK)
    assert elsewhere[BLOCK] == life.generation(BLOCK) == 1
    with pytest.raises(AssertionError, match="one generation a block"):
        BlockLife(3, elsewhere)
