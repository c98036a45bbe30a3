"""Cases from public reports of other servers about preemption and split serving, between real engines."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from engine.messages import AddRequest
from tests.support.engines import (
    BLOCK_SIZE,
    EngineHarness,
    abort,
    make_request,
    run_alone,
    turn_until,
)
from tests.support.scenes import answer, random_prompt, run_to_end, settle, split_pair, submit

LENGTHS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 4 * BLOCK_SIZE)
MAX_TOKENS = (1, 2, BLOCK_SIZE, BLOCK_SIZE + 1)


@pytest.mark.public_case("B23")
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_preempt_each_other_answer_as_alone(seed: int) -> None:
    requests = [
        make_request(
            name,
            random_prompt(2 * BLOCK_SIZE + 2, seed * 10 + index),
            max_tokens=3 * BLOCK_SIZE + 3,
            logprobs=1,
        )
        for index, name in enumerate(("a", "b"))
    ]
    engine = EngineHarness(num_blocks=10)
    try:
        for request in requests:
            engine.inbox.post(AddRequest(request))
        turn_until(lambda: all(engine.finish_reasons(r.id) for r in requests), engine)
        assert engine.stats.preemptions_total >= 1
        for request in requests:
            assert [engine.tokens(request.id)] == run_alone(request)
            told = [o for o in engine.outputs[request.id] if o.token_ids]
            assert sum(len(o.token_ids) for o in told) == 3 * BLOCK_SIZE + 3
            assert [len(o.logprobs) for o in told] == [len(o.token_ids) for o in told]
        turn_until(engine.is_idle, engine)
    finally:
        engine.close()


@pytest.mark.public_case("B24")
@pytest.mark.parametrize("is_lost", [False, True])
def test_requests_given_up_while_they_wait_for_kv_leave_nothing(is_lost: bool) -> None:
    with split_pair("p1", "p2", num_blocks=24, prefill={"num_blocks": 24}) as wire:
        for number in range(50):
            request = make_request(f"r{number}", random_prompt(70, number))
            submit(wire, request, "p1")
            wire.held = number % 2 == 0  # every other one before P has heard anything
            for _ in range(number % 7):
                for engine in (wire, wire.decode, wire.prefill["p1"]):
                    engine.turn()
            abort(wire.decode, request.id)
            wire.decode.turn()
            wire.held = False
        if is_lost:
            wire.cut("p1")
        settle(wire)
        fresh = [make_request(f"f{n}", random_prompt(40, n), max_tokens=4) for n in range(20)]
        for request in fresh:
            submit(wire, request, "p2" if is_lost else "p1")
        run_to_end(wire, *fresh)
        assert [answer(wire, r) for r in fresh] == [run_alone(r) for r in fresh]


@pytest.mark.public_case("B28")
def test_every_length_about_a_block_answers_as_one_engine() -> None:
    with split_pair() as wire:
        for length, max_tokens in itertools.product(LENGTHS, MAX_TOKENS):
            cold = make_request(
                f"{length}-{max_tokens}", random_prompt(length, length), max_tokens=max_tokens
            )
            again = replace(cold, id=f"{cold.id}-again")  # type: ignore[arg-type]
            for request in (cold, again):
                submit(wire, request, "p1")
                run_to_end(wire, request)
                assert answer(wire, request) == run_alone(request), request.id
                assert len(answer(wire, request)[0]) == max_tokens
                assert wire.decode.finish_reasons(request.id) == {0: "length"}


@pytest.mark.public_case("B28")
def test_a_first_token_that_ends_the_answer_ends_it() -> None:
    prompt = random_prompt(BLOCK_SIZE)
    ((first, *_),) = run_alone(make_request("alone", prompt))
    request = make_request("r", prompt, stop_token_ids=(first,))
    with split_pair() as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert wire.decode.finish_reasons(request.id) == {0: "stop"}
        assert answer(wire, request) == run_alone(request)


@pytest.mark.public_case("B29")
@pytest.mark.parametrize("fault", ["killed", "other KV dtype", "no way for KV"])
def test_a_prefill_worker_that_cannot_deliver_costs_no_answer(fault: str) -> None:
    """Killed within a long prompt; of another layout, refused by name; reached by no transport."""
    long = make_request("long", random_prompt(300), max_tokens=4)
    short = [make_request(f"s{n}", random_prompt(20, n), max_tokens=4) for n in range(4)]
    other = {"kv_cache_dtype": "float16"} if fault == "other KV dtype" else {}
    with split_pair("p1", "p2", prefill=other) as wire:
        submit(wire, long, "p1")
        p1 = wire.prefill["p1"]
        if fault == "killed":
            turn_until(lambda: p1.stats.num_held_blocks > 0, wire, wire.decode, p1)
            wire.cut("p1")
        elif fault == "no way for KV":
            for end in wire.decode.receivers._receivers:
                end.stop()
        for request in short:
            submit(wire, request, "p1", "p2")
        run_to_end(wire, long, *short)
        for request in (long, *short):
            assert answer(wire, request) == run_alone(request), request.id
        assert wire.decode.stats.sessions_failed_total >= 1


@pytest.mark.public_case("B30")
@pytest.mark.parametrize("num_choices", [1, 2])
def test_the_first_token_has_its_logprobs_too(num_choices: int) -> None:
    request = make_request("r", random_prompt(40), max_tokens=4, n=num_choices, logprobs=2)
    alone = EngineHarness()
    try:
        alone.inbox.post(AddRequest(request))
        turn_until(lambda: len(alone.finish_reasons(request.id)) == num_choices, alone)
    finally:
        alone.close()
    with split_pair() as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        for choice in range(num_choices):
            ours, theirs = (
                [x for o in e.outputs[request.id] if o.choice == choice for x in o.logprobs]
                for e in (wire.decode, alone)
            )
            assert len(ours) == len(theirs) == 4
            for split, whole in zip(ours, theirs, strict=True):
                assert split.top_token_ids == whole.top_token_ids
                assert split.logprob == pytest.approx(whole.logprob, abs=1e-3)
                assert split.top_logprobs == pytest.approx(whole.top_logprobs, abs=1e-3)


@pytest.mark.public_case("B31")
@pytest.mark.parametrize("seed", range(4))
def test_blocks_used_anew_after_a_lease_are_never_decoded_from(seed: int) -> None:
    """D stands still for longer than the lease while P's blocks are used by 20 other prompts."""
    request = make_request("r", random_prompt(100, seed), max_tokens=6)
    slow = {"num_blocks": 12, "link_rate_bytes_s": 20_000.0}
    with split_pair(prefill=slow, session_lease_ms=100) as wire:
        prefill = wire.prefill["p1"]
        submit(wire, request, "p1")
        turn_until(lambda: prefill.stats.blocks_outstanding > 0, wire, wire.decode, prefill)
        wire.held = True
        turn_until(prefill.is_idle, prefill)
        others = [make_request(f"o{n}", random_prompt(90, 50 + n), max_tokens=2) for n in range(20)]
        for other in others:
            prefill.inbox.post(AddRequest(other))
        turn_until(lambda: all(prefill.finish_reasons(o.id) for o in others), prefill)
        wire.held = False
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert wire.decode.stats.sessions_failed_total == 1
