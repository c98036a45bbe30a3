"""P's side: prompts computed for another worker."""

from __future__ import annotations

import pytest

from core.blocks import BlockState
from core.errors import ContextTooLong
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Gate, Sequence, SequenceStatus
from tests.support.sequences import (
    EOS,
    assert_idle,
    make_scheduler,
    make_sequence,
    planned,
    pool_of,
    run_all,
    step,
)


def add_session(scheduler: Scheduler, name: str = "s", **settings: object) -> Sequence:
    sequence = make_sequence(name, **settings)
    scheduler.add_session(sequence)
    return sequence


def grant(scheduler: Scheduler, sequence: Sequence) -> None:
    assert scheduler.take_blocks(sequence)
    scheduler.open_gate(sequence)


def test_a_session_is_announced_granted_run_and_released() -> None:
    scheduler = make_scheduler()
    session = add_session(scheduler, prompt=40)
    assert scheduler.sessions_due() == [session]
    assert scheduler.take_blocks(session)
    assert len(session.block_table) == 3
    assert scheduler.sessions_due() == []
    assert not scheduler.has_work
    assert step(scheduler)[0].items == [], "not before the grant"
    scheduler.open_gate(session)
    assert scheduler.has_work
    output, updates = step(scheduler, tokens=[5])
    assert planned(output) == {"s": 40}
    assert [(u.sequence, u.choice, u.finish_reason) for u in updates] == [(session, 0, "")]
    assert session.status is SequenceStatus.FINISHED
    assert not scheduler.has_work
    assert pool_of(scheduler).num_held == 3, "movers may still read its blocks"
    assert session.num_tokens == 40, "P decodes nothing"
    scheduler.release(session)
    scheduler.release(session)
    assert_idle(scheduler)


def test_a_session_answers_with_all_choices_and_their_ends() -> None:
    scheduler = make_scheduler()
    session = add_session(scheduler, n=3, temperature=1.0)
    grant(scheduler, session)
    output, updates = step(scheduler, tokens=[5, EOS, 6])
    assert output.items[0].num_samples == 3
    told = [(u.choice, u.tokens[0].token_id, u.finish_reason) for u in updates]
    assert told == [(0, 5, ""), (1, EOS, "stop"), (2, 6, "")]
    assert output.copies == []
    scheduler.release(session)
    assert_idle(scheduler)


def test_computed_prefixes_are_shared_between_sessions() -> None:
    scheduler = make_scheduler()
    first = add_session(scheduler, "a", prompt=range(100, 150))
    grant(scheduler, first)
    step(scheduler)
    second = add_session(scheduler, "b", prompt=(*range(100, 148), 7, 8, 9))
    grant(scheduler, second)
    assert second.num_cached_tokens == 48
    assert second.block_table.ids()[:3] == first.block_table.ids()[:3]
    assert planned(step(scheduler)[0]) == {"b": 3}
    scheduler.release(first)
    scheduler.check_integrity()
    life = pool_of(scheduler).life
    assert life.state(second.block_table.ids()[0]) is BlockState.COMMITTED
    scheduler.release(second)
    assert_idle(scheduler)


def test_blocks_are_taken_all_or_none() -> None:
    scheduler = make_scheduler(num_usable=5)
    first, second = add_session(scheduler, "a", prompt=48), add_session(scheduler, "b", prompt=48)
    assert scheduler.take_blocks(first)
    assert scheduler.take_blocks(first), "taking twice takes once"
    assert not scheduler.take_blocks(second)
    assert second.block_table.num_held_blocks == 0
    assert pool_of(scheduler).num_held == 3


def test_a_session_that_is_declined_gives_its_blocks_back_and_is_passed_over() -> None:
    scheduler = make_scheduler()
    first, second = add_session(scheduler, "a", prompt=80), add_session(scheduler, "b", prompt=80)
    assert scheduler.sessions_due() == [first], "the second's turn is more than a step away"
    assert scheduler.take_blocks(first)
    scheduler.drop_blocks(first)
    assert first.gate is Gate.PARKED
    assert pool_of(scheduler).num_held == 0
    assert scheduler.sessions_due() == [second]
    grant(scheduler, second)
    assert planned(step(scheduler)[0]) == {"b": 40}, "half of it, as one step cannot hold the whole"
    scheduler.unpark(first)
    scheduler.unpark(first)
    assert scheduler.sessions_due() == [first], "40 tokens are ahead of it"
    for session in (first, second):
        scheduler.release(session)
    assert_idle(scheduler)


def test_sessions_are_due_one_step_ahead() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, num_usable=50)
    sessions = [add_session(scheduler, f"s{index}", prompt=100) for index in range(4)]
    assert scheduler.sessions_due() == sessions[:1]
    assert scheduler.sessions_due(steps_ahead=2) == sessions[:2]
    assert scheduler.sessions_due(steps_ahead=4) == sessions[:3]
    grant(scheduler, sessions[0])
    scheduler.update(scheduler.schedule(), [])
    assert scheduler.sessions_due() == [sessions[1]], "36 tokens are left of the first"


def test_sessions_and_local_prompts_keep_their_order() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    local = make_sequence("local", prompt=60)
    scheduler.add(local)
    session = add_session(scheduler, prompt=60)
    scheduler.add(make_sequence("later", prompt=60))
    grant(scheduler, session)
    assert planned(step(scheduler)[0]) == {"local": 60, "s": 4}
    assert planned(step(scheduler)[0]) == {"local": 1, "s": 56, "later": 7}


def test_a_gated_session_holds_up_nobody() -> None:
    scheduler = make_scheduler()
    session = add_session(scheduler)
    assert scheduler.take_blocks(session)
    scheduler.add(make_sequence("local"))
    assert planned(step(scheduler)[0]) == {"local": 20}


def test_a_session_that_is_next_and_lacks_blocks_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_usable=6, max_num_batched_tokens=200)
    scheduler.add(make_sequence("running", prompt=60, max_tokens=3, ignore_eos=True))
    step(scheduler)
    session = add_session(scheduler, prompt=60)
    scheduler.add(make_sequence("small", prompt=10))
    assert not scheduler.take_blocks(session)
    assert planned(step(scheduler)[0]) == {"running": 1}
    assert planned(step(scheduler)[0]) == {"running": 1}
    assert scheduler.sessions_due() == [session]
    grant(scheduler, session)
    assert planned(step(scheduler)[0]) == {"s": 60, "small": 10}


def test_a_session_that_was_granted_overtakes_a_prompt_that_lacks_blocks() -> None:
    """It holds its blocks: letting it run is what gives them back."""
    scheduler = make_scheduler(num_usable=8, max_num_batched_tokens=200)
    session = add_session(scheduler, prompt=60)
    assert scheduler.take_blocks(session)
    scheduler.add(make_sequence("large", prompt=100))
    late = add_session(scheduler, "late", prompt=30)
    assert scheduler.take_blocks(late)
    scheduler.open_gate(late)
    assert planned(step(scheduler)[0]) == {"late": 30}


def test_a_session_is_never_preempted() -> None:
    scheduler = make_scheduler(num_usable=4, max_num_batched_tokens=16, caching=False)
    scheduler.add(make_sequence("local", prompt=15, max_tokens=30, ignore_eos=True))
    step(scheduler)
    session = add_session(scheduler, prompt=48)
    grant(scheduler, session)
    while not session.is_finished:
        output, _ = step(scheduler)
        assert session not in output.preempted
    assert scheduler.counters.preemptions == 1, "the local one gave way"
    assert pool_of(scheduler).num_held == 3
    scheduler.release(session)
    run_all(scheduler)
    assert_idle(scheduler)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_session_may_end_at_any_time(num_steps: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    session = add_session(scheduler, prompt=60)
    for _ in range(num_steps):
        if session.gate is Gate.CLOSED:
            grant(scheduler, session)
        step(scheduler)
    scheduler.release(session)
    assert session.is_finished
    assert_idle(scheduler)


def test_a_halted_session_computes_no_more_and_keeps_its_blocks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    session = add_session(scheduler, prompt=60)
    grant(scheduler, session)
    step(scheduler)
    scheduler.halt(session)
    scheduler.halt(session)
    assert step(scheduler)[0].items == []
    assert pool_of(scheduler).num_held == 4
    scheduler.release(session)
    scheduler.halt(session)
    assert_idle(scheduler)


def test_a_session_ended_while_its_step_runs_gives_no_answer() -> None:
    scheduler = make_scheduler()
    session = add_session(scheduler)
    grant(scheduler, session)
    output = scheduler.schedule()
    scheduler.release(session)
    from engine.sampler.rows import SampledToken

    assert scheduler.update(output, [SampledToken(5)]) == []
    assert_idle(scheduler)


def test_a_session_needs_room_for_its_prompt_only() -> None:
    scheduler = make_scheduler(num_usable=3)
    session = add_session(scheduler, prompt=48)
    grant(scheduler, session)
    run_all(scheduler)
    scheduler.release(session)
    with pytest.raises(ContextTooLong):
        add_session(scheduler, "b", prompt=49)
    assert_idle(scheduler)
