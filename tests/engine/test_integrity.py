"""The books of an engine: what is wrong is found, named and counted, and the engine goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from core.ids import BlockId, SessionId
from engine import integrity
from engine.messages import AddRequest, GrantPrefill
from tests.support.engines import EngineHarness, Wire, make_request, turn_until
from tests.support.ledger_model import ledger_answer
from tests.support.scenes import ledger_pair, random_prompt, submit

PROMPT = random_prompt(40)


@pytest.fixture
def engine() -> Iterator[EngineHarness]:
    """An engine that has worked and is at rest."""
    made = EngineHarness(is_ledger=True)
    serve(made, "before")
    yield made
    made.core.close()


def serve(engine: EngineHarness, name: str) -> None:
    """One request to its right end, and turns enough for the whole pool to be looked at."""
    request = make_request(name, PROMPT)
    engine.inbox.post(AddRequest(request))
    for _ in range(60):
        engine.core.turn()
    assert [engine.tokens(name)] == ledger_answer(request)


def leak_a_block(engine: EngineHarness) -> str:
    engine.pool.allocate(1)
    return "1 held blocks"


def leak_a_permit(engine: EngineHarness) -> str:
    engine.pool.life.grant(SessionId(1), 1, [])
    return "1 live permits"


def misplace_a_block(engine: EngineHarness) -> str:
    engine.pool._queue.remove(BlockId(60))
    engine.pool._quarantined.add(BlockId(60))
    return "block 60 (FREE, 0 references) is in the wrong place"


def break_a_link(engine: EngineHarness) -> str:
    engine.pool._queue._previous[50] = 7
    return "links of blocks"


def lose_a_hash(engine: EngineHarness) -> str:
    engine.pool._copies[0].clear()
    return "is not found by its hash"


def leave_a_writer_inside(engine: EngineHarness) -> str:
    engine.pool.life._writers[33] += 1
    return "block 33 (FREE, 0 references) has a writer inside"


BREAKS = [
    leak_a_block,
    leak_a_permit,
    misplace_a_block,
    break_a_link,
    lose_a_hash,
    leave_a_writer_inside,
]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda function: function.__name__)
def test_a_violation_is_logged_and_counted_once_each_time_the_engine_comes_to_rest(
    engine: EngineHarness,
    break_it: Callable[[EngineHarness], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert engine.stats.integrity_violations_total == 0
    words = break_it(engine)
    engine.core._idle_check.note_work()
    for _ in range(20):
        engine.core.turn()
    assert engine.stats.integrity_violations_total == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert words in record.message
    with pytest.raises(AssertionError):
        engine.core.check_integrity()


def test_an_engine_with_broken_books_still_serves(engine: EngineHarness) -> None:
    leak_a_block(engine)
    serve(engine, "after")
    assert engine.stats.integrity_violations_total == 1


def test_a_look_is_bounded_and_an_engine_at_rest_is_looked_at_once(
    engine: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "BLOCKS_A_LOOK", 10)
    seen: list[BlockId] = []
    monkeypatch.setattr(engine.pool, "check_block", seen.append)
    engine.core._idle_check.note_work()
    counts = []
    for _ in range(9):
        engine.core.turn()
        counts.append(len(seen))
    assert counts == [10, 20, 30, 40, 50, 60, 64, 64, 64]
    assert sorted(seen) == list(range(1, 65))


def test_an_engine_at_work_is_not_looked_at(engine: EngineHarness) -> None:
    engine.inbox.post(AddRequest(make_request("busy", PROMPT, max_tokens=50)))
    engine.core.turn()
    leak_a_block(engine)
    for _ in range(20):
        engine.core.turn()
    assert engine.stats.integrity_violations_total == 0


# ---- the whole check, with sessions under way


def forget_the_permit(wire: Wire) -> None:
    (arrival,) = wire.decode.core._decode_side._arrivals.values()
    arrival.permit = None


def revoke_the_permit(wire: Wire) -> None:
    (arrival,) = wire.decode.core._decode_side._arrivals.values()
    assert arrival.permit is not None
    wire.decode.pool.life.revoke(arrival.permit)


def grant_another(wire: Wire) -> None:
    wire.decode.pool.life.grant(SessionId(1), 1, [])


def forget_the_arrival(wire: Wire) -> None:
    wire.decode.core._decode_side._of_request.clear()


def pin_one_more(wire: Wire) -> None:
    (arrival,) = wire.decode.core._decode_side._arrivals.values()
    arrival.num_pinned_blocks += 1


@pytest.mark.parametrize(
    "break_it",
    [forget_the_permit, revoke_the_permit, grant_another, forget_the_arrival, pin_one_more],
    ids=lambda function: function.__name__,
)
def test_a_session_that_contradicts_its_permit_is_found(
    break_it: Callable[[Wire], None],
) -> None:
    with ledger_pair() as (wire, _):
        wire.is_slow = True
        submit(wire, make_request("r", PROMPT), "p1")
        granted = lambda: any(isinstance(m, GrantPrefill) for m in wire.passed)  # noqa: E731
        turn_until(granted, wire, wire.decode, wire.prefill["p1"])
        wire.decode.core.check_integrity()
        break_it(wire)
        with pytest.raises(AssertionError):
            wire.decode.core.check_integrity()
        wire.decode.core.check_integrity = lambda: None  # type: ignore[method-assign]


def test_a_session_without_its_blocks_is_found() -> None:
    with ledger_pair() as (wire, _):
        wire.is_slow = True
        prefill = wire.prefill["p1"]
        submit(wire, make_request("r", PROMPT), "p1")
        turn_until(lambda: prefill.pool.num_held > 0, wire, wire.decode, prefill)
        (session,) = prefill.core._prefill_side._sessions.values()
        prefill.scheduler.kv.release(session.sequence)
        with pytest.raises(AssertionError, match="0 blocks held"):
            prefill.core.check_integrity()
        prefill.core.check_integrity = lambda: None  # type: ignore[method-assign]
