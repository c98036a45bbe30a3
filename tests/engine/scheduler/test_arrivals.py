"""D's side: sequences whose prompt KV another worker sends."""

from __future__ import annotations

import pytest

from core.blocks import BlockState
from core.errors import ContextTooLong, NoCapacity
from core.ids import SessionId
from engine.sampler.rows import SampledToken
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
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


def arrive(scheduler: Scheduler, name: str = "r", **settings: object) -> Sequence:
    sequence = make_sequence(name, **settings)
    scheduler.add_arriving(sequence)
    return sequence


def reserve(scheduler: Scheduler, sequence: Sequence) -> int:
    """Pin and reserve in one act; tokens pinned."""
    num_pinned = scheduler.pin_prefix(sequence, sequence.num_tokens)
    assert scheduler.reserve(sequence)
    scheduler.check_integrity()
    return num_pinned


def first_tokens(*token_ids: int) -> list[SampledToken]:
    return [SampledToken(token_id) for token_id in token_ids]


def admit(scheduler: Scheduler, sequence: Sequence, *token_ids: int) -> None:
    """Everything arrives: first tokens, then the KV."""
    scheduler.accept_first_tokens(sequence, first_tokens(*token_ids))
    scheduler.admit_with_kv(sequence, sequence.num_arriving_tokens)
    scheduler.check_integrity()


def states(scheduler: Scheduler, sequence: Sequence) -> list[BlockState]:
    return [pool_of(scheduler).life.state(block) for block in sequence.block_table.ids()]


def warm(scheduler: Scheduler, prompt: tuple[int, ...]) -> None:
    scheduler.add(make_sequence("warm", prompt=prompt, max_tokens=1))
    run_all(scheduler)


def test_an_arriving_sequence_waits_without_blocks() -> None:
    scheduler = make_scheduler()
    sequence = arrive(scheduler)
    assert sequence.status is SequenceStatus.WAITING_FOR_KV
    assert (scheduler.num_arriving, scheduler.num_waiting, scheduler.num_running) == (1, 0, 0)
    assert not scheduler.has_work
    assert scheduler.schedule().items == []
    scheduler.check_integrity()
    scheduler.abort(sequence.request.id)
    assert_idle(scheduler)


def test_kv_received_whole_is_decoded_at_once() -> None:
    scheduler = make_scheduler()
    sequence = arrive(scheduler, prompt=40)
    assert scheduler.blocks_for_prompt(sequence) == 3
    assert scheduler.can_reserve(sequence)
    assert reserve(scheduler, sequence) == 0
    assert states(scheduler, sequence) == [BlockState.RESERVED] * 3
    (update,) = scheduler.accept_first_tokens(sequence, first_tokens(5))
    assert (update.choice, update.tokens[0].token_id, update.finish_reason) == (0, 5, "")
    assert scheduler.schedule().items == [], "a first token alone does not decode"
    scheduler.admit_with_kv(sequence, 40)
    assert states(scheduler, sequence) == [BlockState.COMMITTED] * 2 + [BlockState.FILLING]
    (event,) = pool_of(scheduler).take_events()
    assert len(event.hashes) == 2
    output, _ = step(scheduler)
    (item,) = output.items
    assert (item.start, item.num_tokens, item.num_samples) == (40, 1, 1)
    assert scheduler.counters.received_prompt_tokens == 40
    run_all(scheduler)
    assert sequence.num_output_tokens == 8
    assert_idle(scheduler)


def test_what_is_cached_is_pinned_and_not_sent() -> None:
    scheduler = make_scheduler()
    prompt = tuple(range(100, 150))
    warm(scheduler, prompt)
    sequence = arrive(scheduler, prompt=(*prompt[:40], *range(300, 320)))
    assert scheduler.count_cached_tokens(sequence) == 32
    assert reserve(scheduler, sequence) == 32
    expected = [BlockState.COMMITTED] * 2 + [BlockState.RESERVED] * 2
    assert states(scheduler, sequence) == expected
    admit(scheduler, sequence, 5)
    assert scheduler.counters.received_prompt_tokens == 60 - 32
    assert scheduler.counters.cached_prompt_tokens == 32
    assert sequence.num_cached_tokens == 32
    run_all(scheduler)
    assert_idle(scheduler)


def test_a_prompt_that_is_cached_to_its_last_token_lacks_nothing() -> None:
    scheduler = make_scheduler()
    prompt = tuple(range(100, 132))
    warm(scheduler, (*prompt, 7))
    sequence = arrive(scheduler, prompt=prompt)
    assert reserve(scheduler, sequence) == 32
    assert states(scheduler, sequence) == [BlockState.COMMITTED] * 2
    admit(scheduler, sequence, 5)
    run_all(scheduler)
    assert_idle(scheduler)


def test_reserving_is_all_or_none() -> None:
    scheduler = make_scheduler(num_usable=5)
    first, second = arrive(scheduler, "a", prompt=50), arrive(scheduler, "b", prompt=50)
    reserve(scheduler, first)
    assert not scheduler.can_reserve(second)
    assert not scheduler.reserve(second)
    assert second.block_table.num_held_blocks == 0
    assert scheduler.num_undecoded_blocks == 4
    scheduler.abort(first.request.id)
    assert scheduler.can_reserve(second)
    assert scheduler.reserve(second)


def test_undecoded_blocks_are_counted_until_the_sequence_is_in_the_batch() -> None:
    scheduler = make_scheduler()
    prompt = tuple(range(100, 150))
    warm(scheduler, prompt)
    first = arrive(scheduler, "a", prompt=prompt)
    second = arrive(scheduler, "b", prompt=prompt)
    assert scheduler.num_undecoded_blocks == 0
    reserve(scheduler, first)
    reserve(scheduler, second)
    assert scheduler.num_undecoded_blocks == 3 + 2, "what both pin counts once"
    admit(scheduler, first, 5)
    assert scheduler.num_undecoded_blocks == 5
    step(scheduler)
    assert scheduler.num_undecoded_blocks == 4


def test_an_attempt_given_up_keeps_what_is_whole_and_reserves_the_rest_anew() -> None:
    scheduler = make_scheduler()
    pool = pool_of(scheduler)
    sequence = arrive(scheduler, prompt=70)
    reserve(scheduler, sequence)
    before = list(sequence.block_table.ids())
    permit = pool.life.grant(SessionId(1), 1, before)
    for block in before[:3]:
        assert pool.life.enter(permit, block)
    for block in before[:2]:
        pool.life.leave(block)
    pool.life.revoke(permit)
    scheduler.give_up_blocks(sequence, 2)
    assert sequence.block_table.ids() == before[:2]
    assert states(scheduler, sequence) == [BlockState.COMMITTED] * 2
    assert pool.num_quarantined == 1, "a writer is still in the third"
    scheduler.check_integrity()
    assert reserve(scheduler, sequence) == 32
    assert before[2] not in sequence.block_table.ids()
    assert pool.life.leave(before[2])
    assert pool.settle(before[2])
    admit(scheduler, sequence, 5)
    run_all(scheduler)
    assert_idle(scheduler)


def test_a_later_attempt_pins_what_has_been_computed_meanwhile() -> None:
    scheduler = make_scheduler()
    sequence = arrive(scheduler, prompt=range(100, 170))
    reserve(scheduler, sequence)
    scheduler.give_up_blocks(sequence, 1)
    warm(scheduler, tuple(range(100, 150)))
    assert reserve(scheduler, sequence) == 48
    assert len(sequence.block_table) == 5
    admit(scheduler, sequence, 5)
    run_all(scheduler)
    assert_idle(scheduler)


@pytest.mark.parametrize("num_verified", [0, 2, 4])
def test_local_prefill_begins_with_what_had_arrived(num_verified: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    sequence = arrive(scheduler, prompt=70)
    reserve(scheduler, sequence)
    scheduler.return_to_local(sequence, num_verified)
    assert sequence.status is SequenceStatus.WAITING
    assert sequence.block_table.num_held_blocks == 0
    assert planned(step(scheduler)[0]) == {"r": 70 - 16 * num_verified}
    assert sequence.num_cached_tokens == 16 * num_verified
    run_all(scheduler)
    assert sequence.num_output_tokens == 8
    assert_idle(scheduler)


def test_local_prefill_goes_on_after_a_first_token_that_was_told() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    sequence = arrive(scheduler, prompt=40, max_tokens=3)
    reserve(scheduler, sequence)
    scheduler.accept_first_tokens(sequence, first_tokens(5))
    scheduler.return_to_local(sequence)
    output, updates = step(scheduler)
    assert planned(output) == {"r": 41}
    assert sequence.output_token_ids[0] == 5
    assert len(updates) == 1
    run_all(scheduler)
    assert sequence.num_output_tokens == 3
    assert_idle(scheduler)


def test_a_repeated_answer_changes_nothing() -> None:
    scheduler = make_scheduler()
    sequence = arrive(scheduler)
    reserve(scheduler, sequence)
    assert len(scheduler.accept_first_tokens(sequence, first_tokens(5))) == 1
    assert scheduler.accept_first_tokens(sequence, first_tokens(5)) == []
    assert sequence.output_token_ids == [5]
    assert scheduler.counters.generation_tokens == 1


@pytest.mark.parametrize(
    ("settings", "reason"), [({}, "stop"), ({"max_tokens": 1, "ignore_eos": True}, "length")]
)
def test_a_first_token_that_ends_the_request_frees_everything(
    settings: dict[str, object], reason: str
) -> None:
    scheduler = make_scheduler()
    sequence = arrive(scheduler, **settings)
    reserve(scheduler, sequence)
    (update,) = scheduler.accept_first_tokens(sequence, first_tokens(EOS))
    assert update.finish_reason == reason
    assert sequence.is_finished
    assert_idle(scheduler)


def test_received_kv_waits_for_a_place_before_local_prompts() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence("running", max_tokens=2))
    step(scheduler)
    sequence = arrive(scheduler, "arrived")
    reserve(scheduler, sequence)
    scheduler.add(make_sequence("local"))
    admit(scheduler, sequence, 5)
    assert sequence.status is SequenceStatus.READY
    assert planned(step(scheduler)[0]) == {"running": 1}
    assert planned(step(scheduler)[0]) == {"arrived": 1}
    run_all(scheduler)
    assert_idle(scheduler)


def test_received_kv_that_lacks_a_block_waits_and_keeps_others_from_taking_it() -> None:
    scheduler = make_scheduler(num_usable=5, caching=False)
    scheduler.add(make_sequence("running", prompt=31, max_tokens=10, ignore_eos=True))
    step(scheduler)
    sequence = arrive(scheduler, "arrived", prompt=32, ignore_eos=True)
    reserve(scheduler, sequence)
    step(scheduler)
    step(scheduler)  # the running one takes the last block
    admit(scheduler, sequence, 5)
    assert planned(step(scheduler)[0]) == {"running": 1}
    scheduler.add(make_sequence("small", prompt=3))
    while scheduler.num_running == 2 and sequence.status is SequenceStatus.READY:
        assert "small" not in planned(step(scheduler)[0])
    run_all(scheduler)
    assert scheduler.counters.preemptions == 0, "its received KV was not thrown away"
    assert_idle(scheduler)


def test_two_that_came_and_lack_a_block_each_do_not_wait_for_ever() -> None:
    scheduler = make_scheduler(num_usable=4, caching=False)
    sequences = [arrive(scheduler, name, prompt=32, ignore_eos=True) for name in "ab"]
    for sequence in sequences:
        reserve(scheduler, sequence)
    for sequence in sequences:
        admit(scheduler, sequence, 5)
    run_all(scheduler)
    assert [sequence.num_output_tokens for sequence in sequences] == [8, 8]
    assert [sequence.num_preemptions for sequence in sequences] == [0, 1]
    assert_idle(scheduler)


# ---------------------------------------------------------------- n > 1


def test_tail_copies_are_reserved_with_the_prompt() -> None:
    scheduler = make_scheduler(num_usable=5)
    sequence = arrive(scheduler, prompt=20, n=4, temperature=1.0)
    assert scheduler.blocks_for_prompt(sequence) == 2 + 3
    reserve(scheduler, sequence)
    assert pool_of(scheduler).num_free == 0
    admit(scheduler, sequence, 5, 6, 7, 8)
    output, _ = step(scheduler)
    assert len(output.items) == 4
    assert len(output.copies) == 3
    assert scheduler.counters.preemptions == 0
    run_all(scheduler)
    assert_idle(scheduler)


def test_a_full_tail_needs_no_copies() -> None:
    scheduler = make_scheduler()
    sequence = arrive(scheduler, prompt=32, n=4, temperature=1.0)
    assert scheduler.blocks_for_prompt(sequence) == 2


def test_copies_for_choices_that_have_ended_go_back() -> None:
    scheduler = make_scheduler(num_usable=20)
    sequence = arrive(scheduler, prompt=20, n=4, temperature=1.0)
    reserve(scheduler, sequence)
    updates = scheduler.accept_first_tokens(sequence, first_tokens(EOS, 5, EOS, 6))
    assert [update.finish_reason for update in updates] == ["stop", "", "stop", ""]
    assert scheduler.num_arriving == 1, "choice 0 has ended, its blocks are the others' prompt"
    scheduler.admit_with_kv(sequence, 20)
    scheduler.check_integrity()
    assert sequence.is_finished
    assert pool_of(scheduler).num_held == 2 + 1
    output, _ = step(scheduler)
    assert planned(output) == {"r#1": 1, "r#3": 1}
    assert len(output.copies) == 1
    run_all(scheduler)
    assert_idle(scheduler)


def test_all_choices_return_to_local_prefill_with_their_tokens() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=200)
    sequence = arrive(scheduler, prompt=20, n=3, temperature=1.0)
    reserve(scheduler, sequence)
    scheduler.accept_first_tokens(sequence, first_tokens(EOS, 5, 6))
    scheduler.return_to_local(sequence, 1)
    assert scheduler.num_waiting == 2
    assert planned(step(scheduler)[0]) == {"r#1": 21 - 16, "r#2": 21 - 16}
    run_all(scheduler)
    assert_idle(scheduler)


def test_a_second_attempt_after_first_tokens_reserves_copies_for_all_choices() -> None:
    scheduler = make_scheduler()
    sequence = arrive(scheduler, prompt=20, n=3, temperature=1.0)
    reserve(scheduler, sequence)
    scheduler.accept_first_tokens(sequence, first_tokens(5, 6, 7))
    scheduler.give_up_blocks(sequence)
    assert pool_of(scheduler).num_held == 0
    assert scheduler.blocks_for_prompt(sequence) == 2 + 2
    assert scheduler.pin_prefix(sequence, 20) == 0
    assert scheduler.reserve(sequence)
    assert len(sequence.block_table) == 2
    scheduler.admit_with_kv(sequence, 20)
    output, _ = step(scheduler)
    assert len(output.copies) == 2
    run_all(scheduler)
    assert_idle(scheduler)


def test_an_abort_tells_only_of_choices_that_had_not_ended() -> None:
    scheduler = make_scheduler()
    sequence = arrive(scheduler, prompt=20, n=3, temperature=1.0)
    reserve(scheduler, sequence)
    scheduler.accept_first_tokens(sequence, first_tokens(EOS, 5, 6))
    ended = scheduler.abort(sequence.request.id)
    assert [choice.choice for choice in ended] == [1, 2]
    assert sequence.finish_reason == "stop"
    assert_idle(scheduler)


def test_what_could_never_be_reserved_is_refused() -> None:
    scheduler = make_scheduler(num_usable=5)
    with pytest.raises(NoCapacity, match="needs 6 KV blocks at once, the pool has 5"):
        arrive(scheduler, prompt=20, n=5, temperature=1.0)
    with pytest.raises(ContextTooLong):
        arrive(scheduler, prompt=80)
    assert_idle(scheduler)
    assert arrive(scheduler, prompt=79).num_tokens == 79
