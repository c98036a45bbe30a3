"""Whatever a peer or a client says, an engine goes on: it refuses, falls back, and holds nothing afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from engine.messages import (
    AddPrefill,
    AddRequest,
    AnnouncePrefill,
    CallPrefill,
    ChoiceOutput,
    FirstTokens,
    GrantPrefill,
    PrefillEnded,
    PrefillGranted,
    RefusePrefill,
    TransportOffer,
)
from tests.support.engines import EngineHarness, Wire, make_request, run_alone, turn_until
from tests.support.scenes import answer, random_prompt, run_to_end, settle, split_pair, submit


def add_prefill(engine: EngineHarness, **changes: Any) -> AddPrefill:
    message = AddPrefill(
        session_id=5,
        attempt=1,
        request=make_request("r", random_prompt(40)),
        num_held_tokens=0,
        identity=engine.identity,
        layout=engine.layout,
        transports=[TransportOffer("tcp", ["127.0.0.1:9"])],
        session_secret=b"s" * 32,
        lease_remaining_ms=30_000,
    )
    return msgspec.structs.replace(message, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"session_secret": b"short"},
        {"transports": []},
        {"transports": [TransportOffer("pigeon", ["loft"])]},
        {"request": make_request("r", [1, 10_000])},
        {"request": make_request("r", [1] * 600)},
    ],
    ids=["secret", "no transport", "unknown transport", "token id", "too long"],
)
def test_a_session_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    engine = EngineHarness()
    try:
        engine.inbox.post(add_prefill(engine, **changes))
        engine.turn()
        (refusal,) = engine.said
        assert isinstance(refusal, RefusePrefill)
        assert engine.is_idle()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("addresses", "is_taken"),
    [
        (["127.0.0.1:9", "127.0.0.1:10"], True),
        (["127.0.0.1:9", "127.0.0.1:9"], False),
        (["127.0.0.1:9"], False),
        (["127.0.0.1:9", "127.0.0.1:10", "127.0.0.1:11"], False),
    ],
)
def test_an_offer_names_an_address_for_each_rank_and_none_twice(
    addresses: list[str], is_taken: bool
) -> None:
    engine = EngineHarness()
    try:
        layout = dataclasses.replace(engine.layout, tensor_ranks=2)
        offers = [TransportOffer("tcp", addresses)]
        engine.inbox.post(add_prefill(engine, layout=layout, transports=offers))
        turn_until(lambda: bool(engine.said), engine)
        assert isinstance(engine.said[0], RefusePrefill) is not is_taken
        if is_taken:
            engine.inbox.post(PrefillGranted(5, 1, [0]))
            engine.turn()
            engine.inbox.post(PrefillEnded(5, 1, "given up"))
        turn_until(engine.is_idle, engine)
    finally:
        engine.close()


@pytest.mark.parametrize("first_missing", [[], [0, 0]])
def test_a_grant_for_other_groups_ends_the_session(first_missing: list[int]) -> None:
    engine = EngineHarness()
    try:
        engine.inbox.post(add_prefill(engine))
        turn_until(lambda: bool(engine.said), engine)
        engine.said.clear()
        engine.inbox.post(PrefillGranted(5, 1, first_missing))
        turn_until(engine.is_idle, engine)
        assert isinstance(engine.said[0], RefusePrefill)
    finally:
        engine.close()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "localhost:1", "nonsense", "127.0.0.1:²"])
def test_an_address_that_is_none_fails_its_session_only(address: str) -> None:
    engine = EngineHarness()
    try:
        engine.inbox.post(add_prefill(engine, transports=[TransportOffer("tcp", [address])]))
        turn_until(lambda: bool(engine.said), engine)
        engine.inbox.post(PrefillGranted(5, 1, [0]))
        turn_until(engine.is_idle, engine)
        assert isinstance(engine.said[-1], RefusePrefill)
    finally:
        engine.close()
    request = make_request("after", random_prompt(50))
    with split_pair() as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [ChoiceOutput("r", 1, [3])],
        [ChoiceOutput("r", 0, [])],
        [ChoiceOutput("r", 0, [1_000_000])],
        [ChoiceOutput("r", 0, [3]), ChoiceOutput("r", 0, [3])],
    ],
    ids=["none", "wrong choice", "no token", "no such token", "twice"],
)
@pytest.mark.failure_edge("D rejects (validation/model)")
def test_first_tokens_that_cannot_be_are_not_believed(outputs: list[ChoiceOutput]) -> None:
    request = make_request("r", random_prompt(60))
    with split_pair() as wire:
        lie_about_first_tokens(wire, outputs)
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert wire.decode.stats.local_prefill_fallbacks_total == 1


def lie_about_first_tokens(wire: Wire, outputs: list[ChoiceOutput]) -> None:
    engine = wire.prefill["p1"]

    class Liar(type(engine.said)):  # type: ignore[misc]
        def append(self, message: Any) -> None:
            if isinstance(message, FirstTokens):
                message = msgspec.structs.replace(message, first_outputs=outputs)
            super().append(message)

    engine.said = Liar(engine.said)


@pytest.mark.failure_edge("D rejects (validation/model)")
def test_a_split_request_that_is_refused_leaves_nothing() -> None:
    request = make_request("r", random_prompt(100), n=64)
    with split_pair(num_blocks=16) as wire:
        submit(wire, request, "p1")
        wire.decode.turn()
        settle(wire)
        assert set(wire.decode.finish_reasons("r").values()) == {"error"}


def test_a_large_prompt_is_not_overtaken_for_ever() -> None:
    """A prompt over the cap waits for the pool to itself; newer small ones wait behind it, not before it."""
    large = make_request("large", random_prompt(200, 1), max_tokens=2)
    small = [make_request(f"s{i}", random_prompt(40, i), max_tokens=2) for i in range(12)]
    with split_pair("p1", "p2", num_blocks=20) as wire:
        submit(wire, small[0], "p1")
        submit(wire, large, "p1")
        for request in small[1:]:
            submit(wire, request, "p2")
        run_to_end(wire, large, *small)
        order = [m.session_id for m in wire.passed if isinstance(m, GrantPrefill)]
        calls = {m.request.id: m.session_id for m in wire.passed if hasattr(m, "candidate")}
        assert order.index(calls["large"]) <= 3


def test_cached_tokens_are_those_of_whoever_had_more() -> None:
    first = make_request("a", random_prompt(100), max_tokens=2)
    with split_pair() as wire:
        submit(wire, first, "p1")
        run_to_end(wire, first)
        wire.decode.pool.reset_prefix_cache()
        second = make_request("b", random_prompt(100), max_tokens=2)
        submit(wire, second, "p1")
        run_to_end(wire, second)
        assert wire.decode.outputs[second.id][0].num_cached_tokens == 96


def test_a_later_attempt_carries_less_time_and_a_deadline_ends_an_arrival() -> None:
    request = dataclasses.replace(make_request("r", random_prompt(60)), deadline_ms=400)
    with split_pair() as wire:
        submit(wire, request, "nobody-1", "nobody-2", "p1")
        wire.dropped = {AnnouncePrefill}
        turn_until(lambda: bool(wire.decode.finish_reasons("r")), wire, wire.decode)
        (end,) = (o for o in wire.decode.outputs[request.id] if o.finish_reason)
        assert (end.finish_reason, end.error_kind) == ("error", "DeadlineExceeded")
        calls = [m.request.deadline_ms for m in wire.passed if isinstance(m, CallPrefill)]
        assert len(calls) == 3
        assert calls == sorted(calls, reverse=True)
        assert calls[-1] < 400
        settle(wire)


def test_no_sampling_parameters_kill_an_engine() -> None:
    engine = EngineHarness()
    try:
        requests = [
            make_request("a", [1, 2, 3], temperature=1.0, repetition_penalty=1e-6),
            make_request("b", [1, 2, 3], temperature=1.0, repetition_penalty=1e6),
            make_request(
                "c",
                [1, 2, 3],
                temperature=1.0,
                min_tokens=4,
                stop_token_ids=tuple(range(97)),
            ),
            make_request("d", [1, 2, 3], temperature=1e-9, top_p=1e-9, min_p=1.0),
        ]
        for request in requests:
            engine.inbox.post(AddRequest(request))
        turn_until(lambda: all(engine.finish_reasons(r.id) for r in requests), engine)
        assert engine.is_idle()
    finally:
        engine.close()
