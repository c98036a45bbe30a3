"""Steps of requests that one engine runs alone: budget, chunks, prefix hits, preemption, forks, ends."""

from __future__ import annotations

import pytest

from core.blocks import BlockState
from core.errors import ConfigError, ContextTooLong, InvalidRequest
from core.ids import RequestId
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus, start_sequences
from tests.support.sequences import (
    EOS,
    assert_idle,
    make_request,
    make_scheduler,
    make_sequence,
    planned,
    pool_of,
    run_all,
    step,
)


def add(scheduler: Scheduler, *args: object, **kwargs: object) -> Sequence:
    sequence = make_sequence(*args, **kwargs)
    assert scheduler.add(sequence) is None
    return sequence


# ---------------------------------------------------------------- budget and chunks


@pytest.mark.peer_vectors
def test_several_prompts_in_one_step_then_one_token_each() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8192)
    for index in range(10):
        add(scheduler, f"r{index}", prompt=10)
    assert planned(step(scheduler)[0]) == {f"r{index}": 10 for index in range(10)}
    assert planned(step(scheduler)[0]) == {f"r{index}": 1 for index in range(10)}


@pytest.mark.peer_vectors
def test_prompts_are_cut_to_the_budget() -> None:
    """Three prompts of 800 tokens under a budget of 1024: 800 + 224, then 1 + 576 + 447, then 1 + 1 + 353."""
    scheduler = make_scheduler(num_usable=200, max_num_batched_tokens=1024)
    for name in "abc":
        add(scheduler, name, prompt=800)
    assert planned(step(scheduler)[0]) == {"a": 800, "b": 224}
    assert planned(step(scheduler)[0]) == {"a": 1, "b": 576, "c": 447}
    assert planned(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 353}
    assert planned(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 1}


def test_a_prompt_is_cut_into_equal_chunks() -> None:
    """A last chunk of few tokens costs nearly a full one; what others leave of the budget is the limit."""
    scheduler = make_scheduler(num_usable=200, max_num_batched_tokens=480)
    add(scheduler, "a", prompt=512)
    assert planned(step(scheduler)[0]) == {"a": 256}
    assert planned(step(scheduler)[0]) == {"a": 256}
    add(scheduler, "b", prompt=480)
    add(scheduler, "c", prompt=961)
    assert planned(step(scheduler)[0]) == {"a": 1, "b": 479}
    assert planned(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 321}
    assert planned(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 320}
    assert planned(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 320}


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    add(scheduler, "a", prompt=40)
    samples = [step(scheduler)[0].items[0].num_samples for _ in range(4)]
    assert samples == [0, 0, 1, 1]


def test_a_long_prompt_never_holds_up_a_cadence() -> None:
    """The chunk comes after every decode, also when its request goes first in the policy's order."""
    scheduler = make_scheduler(max_num_batched_tokens=32, max_num_seqs=8, policy="priority")
    for index in range(3):
        add(scheduler, f"short{index}", prompt=5, max_tokens=50, ignore_eos=True)
    step(scheduler)
    long = add(scheduler, "long", prompt=29 * 5, priority=-1)
    for _ in range(5):
        assert planned(step(scheduler)[0]) == {"short0": 1, "short1": 1, "short2": 1, "long": 29}
    assert long.num_output_tokens == 1


def test_no_more_sequences_than_places() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for index in range(4):
        add(scheduler, f"r{index}", prompt=5, max_tokens=2)
    assert planned(step(scheduler)[0]) == {"r0": 5, "r1": 5}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    step(scheduler)
    assert planned(step(scheduler)[0]) == {"r2": 5, "r3": 5}


def test_an_engine_without_requests_plans_nothing() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_work
    assert scheduler.schedule().items == []
    assert scheduler.counters.steps == 0


# ---------------------------------------------------------------- prefix cache


def test_a_second_request_computes_what_the_first_left_out() -> None:
    scheduler = make_scheduler()
    prompt = tuple(range(100, 150))
    first = add(scheduler, "a", prompt=prompt, max_tokens=1)
    step(scheduler)
    second = add(scheduler, "b", prompt=(*prompt[:40], 7, 8, 9), max_tokens=2)
    output, _ = step(scheduler)
    assert planned(output) == {"b": 43 - 40}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32), "whole blocks are told"
    assert scheduler.counters.cached_prompt_tokens == 40
    assert scheduler.counters.prefix_cache_hits == 40
    ((source, own),) = output.copies
    assert own == second.block_table.ids()[2] != source
    assert scheduler.counters.prefix_cache_queries == 50 + 43


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(48, 32), (49, 48), (47, 32), (16, 0)])
def test_at_least_one_token_is_computed(num_tokens: int, num_cached: int) -> None:
    scheduler = make_scheduler()
    for name in "ab":
        sequence = add(scheduler, name, prompt=range(100, 100 + num_tokens), max_tokens=1)
        run_all(scheduler)
    assert sequence.num_cached_tokens == num_cached == (num_tokens - 1) // 16 * 16


def test_generated_tokens_are_found_too() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, "a", prompt=20, max_tokens=30)
    run_all(scheduler)
    second = add(scheduler, "b", prompt=tuple(first.token_ids), max_tokens=1)
    run_all(scheduler)
    assert second.num_cached_tokens == 48, "50 tokens, of which 49 were computed"


def test_salts_keep_caches_apart() -> None:
    scheduler = make_scheduler()
    cached = []
    for name, salt in (("a", ""), ("b", "x"), ("c", "x"), ("d", "y")):
        sequence = add(scheduler, name, prompt=range(100, 150), max_tokens=1, cache_salt=salt)
        run_all(scheduler)
        cached.append(sequence.num_cached_tokens)
    assert cached == [0, 0, 48, 0]


def test_without_prefix_caching_nothing_is_found_nor_published() -> None:
    scheduler = make_scheduler(caching=False)
    for name in "ab":
        sequence = add(scheduler, name, prompt=range(100, 150), max_tokens=20)
        run_all(scheduler)
    assert sequence.num_cached_tokens == 0
    assert pool_of(scheduler).take_events() == []
    assert_idle(scheduler)


def test_blocks_are_published_only_when_computed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20)
    sequence = add(scheduler, "a", prompt=40, max_tokens=1)
    output = scheduler.schedule()
    assert pool_of(scheduler).take_events() == []
    scheduler.update(output, [])
    (event,) = pool_of(scheduler).take_events()
    assert len(event.hashes) == 1
    life = pool_of(scheduler).life
    states = [life.state(block) for block in sequence.block_table.ids()]
    assert states == [BlockState.COMMITTED, BlockState.FILLING, BlockState.RESERVED]


# ---------------------------------------------------------------- admission and preemption


def test_a_prompt_that_does_not_fit_waits_and_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_usable=6, max_num_batched_tokens=200)
    add(scheduler, "a", prompt=60, max_tokens=3)
    large = add(scheduler, "large", prompt=60, max_tokens=1)
    add(scheduler, "small", prompt=10, max_tokens=1)
    assert planned(step(scheduler)[0]) == {"a": 60}
    assert planned(step(scheduler)[0]) == {"a": 1}
    assert large.block_table.num_held_blocks == 0
    assert planned(step(scheduler)[0]) == {"a": 1}
    assert planned(step(scheduler)[0]) == {"large": 60, "small": 10}
    run_all(scheduler)
    assert_idle(scheduler)


def test_a_prompt_is_admitted_with_room_for_its_first_token() -> None:
    """Else it would be computed only to give way at its first decode step."""
    scheduler = make_scheduler(num_usable=4, caching=False)
    add(scheduler, "a", prompt=20, max_tokens=3, ignore_eos=True)
    step(scheduler)
    add(scheduler, "exact", prompt=32)
    assert planned(step(scheduler)[0]) == {"a": 1}
    assert planned(step(scheduler)[0]) == {"a": 1}
    assert planned(step(scheduler)[0]) == {"exact": 32}


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    """What was taken from one for the running is not given to another at once."""
    scheduler = make_scheduler(
        num_usable=9, max_num_seqs=2, max_num_batched_tokens=200, policy="priority", caching=False
    )
    add(scheduler, "a", prompt=31, ignore_eos=True)
    large = add(scheduler, "large", prompt=110, priority=5)
    step(scheduler)
    add(scheduler, "small", prompt=10, priority=3)
    step(scheduler)
    output, _ = step(scheduler)
    assert output.preempted == [large]
    assert planned(output) == {"a": 1}
    assert planned(step(scheduler)[0]) == {"a": 1, "small": 10}


def test_a_prompt_takes_its_blocks_at_once() -> None:
    """Half-admitted prompts could wait for each other for ever."""
    scheduler = make_scheduler(num_usable=10, max_num_batched_tokens=16)
    first, second = add(scheduler, "a", prompt=90), add(scheduler, "b", prompt=90)
    step(scheduler)
    assert (len(first.block_table), len(second.block_table)) == (6, 0)
    run_all(scheduler)
    assert scheduler.counters.preemptions == 0


def test_the_last_to_arrive_gives_way_and_recomputes() -> None:
    scheduler = make_scheduler(num_usable=4, caching=False)
    first = add(scheduler, "a", prompt=31, max_tokens=10)
    second = add(scheduler, "b", prompt=31, max_tokens=10)
    step(scheduler)
    step(scheduler)
    output, _ = step(scheduler)
    assert output.preempted == [second]
    assert planned(output) == {"a": 1}
    assert second.status is SequenceStatus.PREEMPTED
    assert (second.num_computed_tokens, second.num_output_tokens) == (0, 2)
    assert second.block_table.num_held_blocks == 0
    while not first.is_finished:
        assert "b" not in planned(step(scheduler)[0])
    assert planned(step(scheduler)[0]) == {"b": 33}
    run_all(scheduler)
    assert second.num_preemptions == scheduler.counters.preemptions == 1
    assert_idle(scheduler)


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    scheduler = make_scheduler(num_usable=4)
    add(scheduler, "a", prompt=31, max_tokens=4)
    second = add(scheduler, "b", prompt=31, max_tokens=4)
    while not second.num_preemptions:
        step(scheduler)
    run_all(scheduler)
    assert scheduler.counters.prefix_cache_hits > 0
    assert second.num_cached_tokens == 0, (
        "what the client is told is what its prompt found at first"
    )


def test_priority_decides_who_runs_and_who_gives_way() -> None:
    scheduler = make_scheduler(num_usable=4, policy="priority", caching=False)
    low = add(scheduler, "low", prompt=31, max_tokens=10, priority=5)
    step(scheduler)
    high = add(scheduler, "high", prompt=31, max_tokens=10, priority=-5)
    while not low.num_preemptions:
        step(scheduler)
    assert not high.num_preemptions
    later = add(scheduler, "later", prompt=5, max_tokens=1, priority=0)
    while not later.is_finished:
        step(scheduler)
    assert low.status is SequenceStatus.PREEMPTED, (
        "a lower value goes first, also among the waiting"
    )
    run_all(scheduler)
    assert_idle(scheduler)


def test_a_lone_sequence_may_fill_the_whole_pool_and_ends_there() -> None:
    scheduler = make_scheduler(num_usable=3)
    sequence = add(scheduler, "a", prompt=40, max_tokens=100, ignore_eos=True)
    run_all(scheduler)
    assert (sequence.num_tokens, sequence.finish_reason) == (48, "length")
    assert scheduler.counters.preemptions == 0
    assert_idle(scheduler)


# ---------------------------------------------------------------- refusals


def test_what_can_never_run_is_refused_at_once() -> None:
    scheduler = make_scheduler(num_usable=4, max_model_len=50, vocab_size=20_000)
    with pytest.raises(ContextTooLong, match="maximum model length of 50"):
        scheduler.add(make_sequence("a", prompt=50))
    with pytest.raises(InvalidRequest, match="prompt holds token id 20000"):
        scheduler.add(make_sequence("b", prompt=(1, 20_000)))
    with pytest.raises(InvalidRequest, match="logit_bias holds token id 30000"):
        scheduler.add(make_sequence("c", prompt=2, logit_bias=((30_000, 1.0),)))
    tight = make_scheduler(num_usable=2)
    with pytest.raises(ContextTooLong, match="KV pool holds 32"):
        tight.add(make_sequence("d", prompt=32))
    assert_idle(scheduler)
    assert tight.add(make_sequence("e", prompt=31, max_tokens=5)) is None
    run_all(tight)
    assert_idle(tight)


def test_bad_settings_name_the_flag() -> None:
    with pytest.raises(ConfigError, match="max_model_len: 0"):
        SchedulerConfig(16, 64, 16, 0)
    with pytest.raises(ConfigError, match="--scheduling-policy: 'lifo' is unknown"):
        SchedulerConfig(16, 64, 16, 10, policy="lifo")
    with pytest.raises(ConfigError, match="--max-num-batched-tokens: 8 must be at least"):
        SchedulerConfig(16, 8, 16, 10)


# ---------------------------------------------------------------- ends


def test_ends_are_told_with_their_reason() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    add(scheduler, "eos")
    add(scheduler, "stop", stop_token_ids=(33,))
    add(scheduler, "length", max_tokens=1)
    add(scheduler, "on")
    _, updates = step(scheduler, tokens=[EOS, 33, 5, 6])
    told = [(str(u.sequence.request.id), u.finish_reason, u.stop_token_id) for u in updates]
    assert told == [
        ("eos", "stop", None),
        ("stop", "stop", 33),
        ("length", "length", None),
        ("on", "", None),
    ]
    assert [update.tokens[0].token_id for update in updates] == [EOS, 33, 5, 6]
    assert scheduler.num_running == 1


def test_abort_frees_at_once_wherever_a_sequence_stands() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    running = add(scheduler, "running", prompt=10)
    step(scheduler)
    chunk = add(scheduler, "chunk", prompt=100)
    step(scheduler)
    waiting = add(scheduler, "waiting")
    for sequence in (waiting, chunk, running):
        assert scheduler.abort(sequence.request.id) == [sequence]
        assert sequence.is_finished
        assert sequence.finish_reason == "abort"
        scheduler.check_integrity()
    assert scheduler.abort(RequestId("unknown")) == []
    assert scheduler.abort(running.request.id) == []
    assert_idle(scheduler)


def test_an_abort_while_a_step_runs_discards_its_token() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a")
    other = add(scheduler, "b")
    output = scheduler.schedule()
    scheduler.abort(RequestId("a"))
    updates = scheduler.update(output, [*step_tokens(5, 6)])
    assert [update.sequence for update in updates] == [other]
    assert other.output_token_ids == [6]
    scheduler.check_integrity()


def step_tokens(*token_ids: int):
    from engine.sampler.rows import SampledToken

    return [SampledToken(token_id) for token_id in token_ids]


def test_a_migrated_run_goes_on_from_its_tokens() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "m", prompt=20, output=((5, 6, 7),), max_tokens=4)
    output, updates = step(scheduler)
    assert planned(output) == {"m": 23}
    assert sequence.num_output_tokens == 4
    assert updates[0].finish_reason == "length"
    assert sequence.num_cached_tokens == 0


def test_a_migrated_run_that_is_over_ends_at_once() -> None:
    scheduler = make_scheduler()
    update = scheduler.add(make_sequence("m", output=((5, EOS),)))
    assert update is not None
    assert (update.finish_reason, update.tokens) == ("stop", [])
    assert_idle(scheduler)


# ---------------------------------------------------------------- n > 1


def test_choices_share_the_prompt_and_the_tail_until_they_write() -> None:
    scheduler = make_scheduler(num_usable=20)
    parent = add(scheduler, "n", prompt=20, n=3, temperature=1.0)
    output, updates = step(scheduler, tokens=[5, 6, 7])
    assert [item.num_samples for item in output.items] == [3]
    assert [(u.choice, u.tokens[0].token_id) for u in updates] == [(0, 5), (1, 6), (2, 7)]
    choices = [update.sequence for update in updates]
    assert choices[0] is parent
    tables = [choice.block_table.ids() for choice in choices]
    assert tables[0] == tables[1] == tables[2]
    assert pool_of(scheduler).num_held == 2
    tail = tables[0][1]
    output, _ = step(scheduler, tokens=[8, 9, 10])
    assert [source for source, _ in output.copies] == [tail, tail]
    assert len({destination for _, destination in output.copies} | {tail}) == 3
    assert choices[2].block_table.ids()[1] == tail, "the last to write keeps the original"
    assert [choice.token_ids[20:] for choice in choices] == [[5, 8], [6, 9], [7, 10]]
    assert pool_of(scheduler).num_held == 4
    run_all(scheduler)
    assert_idle(scheduler)


def test_a_full_tail_is_not_copied() -> None:
    scheduler = make_scheduler(num_usable=20)
    add(scheduler, "n", prompt=32, n=2, temperature=1.0)
    step(scheduler, tokens=[5, 6])
    output, _ = step(scheduler, tokens=[7, 8])
    assert output.copies == []
    assert pool_of(scheduler).num_held == 4


def test_choices_that_end_with_their_first_token() -> None:
    scheduler = make_scheduler()
    add(scheduler, "n", prompt=20, n=3, temperature=1.0)
    _, updates = step(scheduler, tokens=[EOS, 5, EOS])
    assert [update.finish_reason for update in updates] == ["stop", "", "stop"]
    assert scheduler.num_running == 1
    output, _ = step(scheduler, tokens=[6])
    assert output.copies == [], "the one that is left owns the tail"
    assert planned(output) == {"n#1": 1}
    run_all(scheduler)
    assert_idle(scheduler)


def test_an_abort_ends_all_choices() -> None:
    scheduler = make_scheduler()
    add(scheduler, "n", n=4, temperature=1.0)
    step(scheduler, tokens=[5, 6, 7, 8])
    assert len(scheduler.abort(RequestId("n"))) == 4
    assert_idle(scheduler)


def test_a_request_of_many_choices_waits_for_its_places() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    add(scheduler, "one", prompt=5, max_tokens=2)
    add(scheduler, "four", prompt=5, n=4, temperature=1.0)
    assert planned(step(scheduler, tokens=[5])[0]) == {"one": 5}
    assert planned(step(scheduler, tokens=[5])[0]) == {"one": 1}
    assert planned(step(scheduler, tokens=[5, 6, 7, 8])[0]) == {"four": 5}


def test_more_choices_than_places_run_one_after_the_other() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, "n", prompt=5, n=5, temperature=1.0, max_tokens=3)
    updates = run_all(scheduler)
    ended = [update.choice for update in updates if update.finish_reason]
    assert sorted(ended) == [0, 1, 2, 3, 4]
    assert_idle(scheduler)


def test_preempted_choices_recompute_each_on_its_own() -> None:
    scheduler = make_scheduler(num_usable=6, caching=False)
    add(scheduler, "n", prompt=30, n=3, temperature=1.0, max_tokens=20)
    updates = run_all(scheduler)
    assert scheduler.counters.preemptions > 0
    assert sorted(u.choice for u in updates if u.finish_reason) == [0, 1, 2]
    assert_idle(scheduler)


def test_a_migrated_run_of_several_choices_starts_as_several_sequences() -> None:
    request = make_request("m", prompt=40, n=2, temperature=1.0, output=((5,), (6, 7)))
    sequences = start_sequences(request)
    assert [(s.choice, s.num_choices, s.output_token_ids) for s in sequences] == [
        (0, 1, [5]),
        (1, 1, [6, 7]),
    ]
    scheduler = make_scheduler()
    for sequence in sequences:
        scheduler.add(sequence)
    assert len(run_all(scheduler)) > 0
    assert_idle(scheduler)
    with pytest.raises(InvalidRequest, match="output_token_ids holds 1 lists, but n is 2"):
        start_sequences(make_request("m", n=2, temperature=1.0, output=((5,),)))
