"""Split serving between two real engines: same tokens as one engine alone, and nothing held afterwards."""

from __future__ import annotations

import pytest

from engine.messages import (
    AnnouncePrefill,
    CallPrefill,
    DeclinePrefill,
    EndPrefill,
    FirstTokens,
    GrantPrefill,
    RoomForPrefill,
)
from tests.support.engines import (
    BLOCK_SIZE,
    abort,
    make_request,
    run_alone,
    turn_until,
)
from tests.support.scenes import (
    answer,
    random_prompt,
    run_random_mix,
    run_to_end,
    settle,
    split_pair,
    submit,
)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100, 161])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_split_answer_is_the_answer_of_one_engine_alone(length: int, num_choices: int) -> None:
    request = make_request(
        "r", random_prompt(length), max_tokens=20, n=num_choices, temperature=0.9, logprobs=2
    )
    with split_pair() as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert wire.decode.stats.sessions_completed_total == 1
        assert wire.decode.stats.computed_prompt_tokens_total == 0
        assert wire.decode.stats.received_prompt_tokens_total == length
        logprobs = [x for o in wire.decode.outputs[request.id] for x in o.logprobs]
        assert len(logprobs) == 20 * num_choices


def test_only_what_decode_lacks_is_sent() -> None:
    first = make_request("a", random_prompt(100), max_tokens=4)
    second = make_request("b", [*random_prompt(100), 1, 2, 3], max_tokens=4)
    with split_pair() as wire:
        submit(wire, first, "p1")
        run_to_end(wire, first)
        sent = wire.prefill["p1"].senders.counters.sent_bytes_total
        submit(wire, second, "p1")
        run_to_end(wire, second)
        grants = [m for m in wire.passed if isinstance(m, GrantPrefill)]
        assert [g.first_missing_block for g in grants] == [[0], [100 // BLOCK_SIZE]]
        again = wire.prefill["p1"].senders.counters.sent_bytes_total - sent
        assert again == wire.decode.layout.block_bytes
        assert answer(wire, second) == run_alone(second)
        assert wire.prefill["p1"].stats.cached_prompt_tokens_total == 96


def test_the_beginning_of_a_block_is_computed_once() -> None:
    prompt = random_prompt(100)
    first = make_request("a", prompt, max_tokens=4)
    second = make_request("b", [*prompt[:88], *range(1, 21)], max_tokens=4)
    with split_pair() as wire:
        for request in (first, second):
            submit(wire, request, "p1")
            run_to_end(wire, request)
            assert answer(wire, request) == run_alone(request)
        grants = [m for m in wire.passed if isinstance(m, GrantPrefill)]
        assert [g.first_missing_block for g in grants] == [[0], [80 // BLOCK_SIZE]]
        assert wire.prefill["p1"].stats.cached_prompt_tokens_total == 88
        assert wire.prefill["p1"].stats.computed_prompt_tokens_total == 100 + 108 - 88
        told = [o.num_cached_tokens for o in wire.decode.outputs[second.id]]
        assert told[0] == 80, "whole blocks"


@pytest.mark.failure_edge("D full prefix hit")
def test_a_prompt_that_decode_holds_whole_moves_no_block() -> None:
    prompt = random_prompt(64)
    first, second = make_request("a", prompt), make_request("b", prompt)
    with split_pair() as wire:
        submit(wire, first, "p1")
        run_to_end(wire, first)
        sent = wire.prefill["p1"].senders.counters.sent_runs_total
        submit(wire, second, "p1")
        run_to_end(wire, second)
        assert wire.prefill["p1"].senders.counters.sent_runs_total == sent
        assert answer(wire, second) == answer(wire, first) == run_alone(second)


def test_the_first_token_is_relayed_before_the_transfer_ends() -> None:
    request = make_request("r", random_prompt(120), max_tokens=3)
    with split_pair(prefill={"link_rate_bytes_s": 200_000.0}) as wire:
        submit(wire, request, "p1")
        turn_until(lambda: bool(wire.decode.tokens("r")), wire, wire.decode, wire.prefill["p1"])
        assert wire.decode.stats.num_arriving == 1
        assert wire.decode.stats.sessions_completed_total == 0
        run_to_end(wire, request)
        moments = wire.decode.outputs[request.id][-1].timestamps_ms
        assert moments["first_token"] < moments["kv_complete"] <= moments["admitted"]
        assert moments["admitted"] < moments["second_token"]


def test_a_relayed_first_token_does_not_wait_for_a_step() -> None:
    """When token and KV are there at once, the first token is told alone, before the step that makes the second."""
    request = make_request("r", random_prompt(40), max_tokens=3)
    with split_pair() as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        told = [len(output.token_ids) for output in wire.decode.outputs[request.id]]
        assert told == [1, 1, 1]
        assert wire.decode.num_told >= 3, "each in a message of its own"


STEPS = [CallPrefill, AnnouncePrefill, GrantPrefill, FirstTokens, EndPrefill]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.failure_edge("client gone before P starts")
@pytest.mark.failure_edge("client gone in P's last step")
@pytest.mark.failure_edge("client gone after P done, before D admits")
def test_an_abort_at_each_step_frees_everything_at_once(step: type) -> None:
    request = make_request("r", random_prompt(120), max_tokens=30)
    with split_pair(prefill={"link_rate_bytes_s": 400_000.0}) as wire:
        submit(wire, request, "p1")
        seen = lambda: any(isinstance(message, step) for message in wire.passed)  # noqa: E731
        turn_until(seen, wire, wire.decode, wire.prefill["p1"])
        abort(wire.decode, "r")
        settle(wire)
        assert wire.decode.finish_reasons("r") == {0: "abort"}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("candidates", [("p1",), ("p1", "p2")], ids=["alone", "with next"])
@pytest.mark.failure_edge("P dies before transfer")
@pytest.mark.failure_edge("P dies mid-transfer")
def test_prefill_lost_at_each_step_changes_no_token(
    step: type, candidates: tuple[str, ...]
) -> None:
    request = make_request("r", random_prompt(120), max_tokens=30, n=2, temperature=0.8)
    with split_pair(*candidates, prefill={"link_rate_bytes_s": 400_000.0}) as wire:
        submit(wire, request, *candidates)
        seen = lambda: any(isinstance(message, step) for message in wire.passed)  # noqa: E731
        turn_until(seen, wire, wire.decode, *wire.prefill.values())
        wire.cut("p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        positions = [len(wire.decode.tokens("r", choice)) for choice in (0, 1)]
        assert positions == [30, 30], "no token repeated, none missing"
        if step is not EndPrefill:
            assert wire.decode.stats.sessions_failed_total == 1
            assert wire.decode.stats.local_prefill_fallbacks_total == 2 - len(candidates)


def test_what_arrived_before_a_loss_is_not_asked_for_again() -> None:
    request = make_request("r", random_prompt(160), max_tokens=4)
    with split_pair("p1", "p2", prefill={"link_rate_bytes_s": 100_000.0}) as wire:
        submit(wire, request, "p1", "p2")
        acknowledged = lambda: (  # noqa: E731
            wire.prefill["p1"].senders.counters.blocks_acknowledged_total >= 2
        )
        turn_until(acknowledged, wire, wire.decode, *wire.prefill.values())
        wire.cut("p1")
        run_to_end(wire, request)
        grants = [m for m in wire.passed if isinstance(m, GrantPrefill)]
        assert grants[1].first_missing_block[0] >= 2
        assert answer(wire, request) == run_alone(request)


@pytest.mark.failure_edge("D rejects (validation/model)")
def test_another_model_is_refused_by_name_and_decode_computes_itself() -> None:
    request = make_request("r", random_prompt(50))
    with split_pair(prefill={"model_seed": 5}) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert wire.decode.stats.local_prefill_fallbacks_total == 1


@pytest.mark.failure_edge("D out of KV")
def test_more_sessions_than_decode_has_room_for_all_end_right() -> None:
    requests = [make_request(f"r{i}", random_prompt(90, i), max_tokens=12) for i in range(8)]
    with split_pair(num_blocks=20, prefill={"num_blocks": 20}) as wire:
        for request in requests:
            submit(wire, request, "p1")
        run_to_end(wire, *requests)
        assert any(isinstance(m, DeclinePrefill) for m in wire.passed)
        assert any(isinstance(m, RoomForPrefill) for m in wire.passed)
        for request in requests:
            assert answer(wire, request) == run_alone(request)
        assert wire.decode.stats.local_prefill_fallbacks_total == 0


@pytest.mark.failure_edge("completion twice / late / never")
def test_a_prefill_worker_that_falls_silent_is_given_up() -> None:
    request = make_request("r", random_prompt(70))
    with split_pair(prefill_timeout_ms=150) as wire:
        submit(wire, request, "p1")
        wire.dropped = {FirstTokens}
        run_to_end(wire, request)
        assert wire.decode.stats.sessions_failed_total == 1
        assert answer(wire, request) == run_alone(request)


@pytest.mark.failure_edge("D dies holding P's lease")
def test_a_session_that_nobody_renews_ends_at_its_lease() -> None:
    request = make_request("r", random_prompt(70))
    with split_pair(session_lease_ms=100) as wire:
        submit(wire, request, "p1")
        turn_until(
            lambda: bool(wire.prefill["p1"].stats.num_held_blocks),
            wire,
            wire.decode,
            wire.prefill["p1"],
        )
        wire.held = True
        prefill = wire.prefill["p1"]
        turn_until(prefill.is_idle, prefill)
        assert prefill.pool.num_held == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_mixes_of_requests_aborts_and_losses_end_right(seed: int) -> None:
    run_random_mix(seed)
