"""Rows of the failure matrix that are about one request between D and P, each shown on whole engines.

Blocks are pushed here. A row that was written for pulls is shown by what takes its place, named in the test. "Fails"
reads: D computes what it lacks, and the request fails at its deadline only. Every test ends with the right tokens,
or with those up to the client's leaving, and with both engines at rest: no block held or in quarantine, no permit, no
session, nothing outstanding, books in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from core.errors import TransferError
from core.ids import SessionId
from core.request import Request
from engine.messages import (
    AnnouncePrefill,
    CallPrefill,
    ChoiceOutput,
    EndPrefill,
    EngineStopped,
    FirstTokens,
    GrantPrefill,
    PrefillAnnounced,
    PrefillAnswered,
    PrefillLost,
    RefusePrefill,
    Shutdown,
)
from kvtransfer.events import ReceiveFailed, RunAdmitted, SessionComplete
from kvtransfer.transports.fake.ends import FakeSender
from kvtransfer.transports.fake.link import FakeLink
from kvtransfer.transports.fake.network import FakeNetwork
from kvtransfer.transports.fake.packets import Fault
from tests.support.engines import EngineHarness, Wire, abort, make_request, turn_until
from tests.support.ledger_model import ledger_answer
from tests.support.scenes import (
    answer,
    ledger_pair,
    random_prompt,
    run_to_end,
    settle,
    submit,
)
from tests.support.simulation import simulated_clock


def request_of(num_tokens: int = 70, max_tokens: int = 12, name: str = "r") -> Request:
    """By default four full blocks and a tail, in two chunks."""
    return make_request(name, random_prompt(num_tokens, len(name)), max_tokens=max_tokens)


def until(done: Callable[[], bool], wire: Wire) -> None:
    turn_until(done, wire, wire.decode, *wire.prefill.values())


def until_said(wire: Wire, kind: type) -> None:
    until(lambda: any(isinstance(message, kind) for message in wire.passed), wire)


def until_inside(wire: Wire, network: FakeNetwork) -> FakeLink:
    """A whole prompt is queued by P; its first run stands half written, a writer inside the block."""
    wire.is_slow = True
    until_said(wire, FirstTokens)
    while not any(link.is_inside_slice for link in network.links):
        assert network.step()
    return network.links[-1]


def end_right(wire: Wire, *requests: Request) -> None:
    run_to_end(wire, *requests)
    for request in requests:
        assert answer(wire, request) == ledger_answer(request)


def sender_of(engine: EngineHarness) -> FakeSender:
    sender = engine.sender
    assert isinstance(sender, FakeSender)
    return sender


# ---- the client is gone


@pytest.mark.failure_edge("client gone before P starts")
def test_a_client_that_leaves_before_prefill_starts_costs_no_step() -> None:
    with ledger_pair() as (wire, _):
        submit(wire, request_of(), "p1")
        turn_until(lambda: bool(wire.passed), wire, wire.decode)  # P has it in its inbox
        abort(wire.decode, "r")
        turn_until(lambda: isinstance(wire.passed[-1], EndPrefill), wire, wire.decode)
        settle(wire)
        assert wire.prefill["p1"].stats.steps_total == 0
        assert not any(isinstance(message, AnnouncePrefill) for message in wire.passed)
        assert wire.decode.finish_reasons("r") == {0: "abort"}


@pytest.mark.failure_edge("client gone in P's last step")
def test_a_client_that_leaves_in_prefills_last_step_is_an_abort() -> None:
    with ledger_pair() as (wire, _):
        prefill = wire.prefill["p1"]
        forward = prefill.core._runner.forward

        def leave_meanwhile(*arguments: Any) -> Any:
            abort(wire.decode, "r")
            wire.decode.turn()
            wire.turn()  # P's inbox holds the end while its only step runs
            return forward(*arguments)

        prefill.core._runner.forward = leave_meanwhile  # type: ignore[method-assign]
        submit(wire, request_of(40), "p1")
        until_said(wire, EndPrefill)
        assert any(isinstance(message, FirstTokens) for message in prefill.said)
        for _ in range(2):  # the end of the session, and its mover's word that nothing is read
            prefill.turn()
        assert prefill.is_idle()
        settle(wire)
        assert wire.decode.finish_reasons("r") == {0: "abort"}
        assert wire.decode.tokens("r") == []


@pytest.mark.failure_edge("client gone after P done, before D admits")
def test_a_client_that_leaves_before_its_kv_has_come_is_told_to_prefill_at_once() -> None:
    """Push: D ends the session, P drops what it has not sent, and what is on its way is written nowhere."""
    with ledger_pair() as (wire, network):
        submit(wire, request_of(), "p1")
        wire.is_slow = True
        until(lambda: wire.decode.tokens("r") != [], wire)
        for _ in range(8):
            network.step()
        abort(wire.decode, "r")
        settle(wire)  # although the network stands still
        before = bytes(wire.decode.storage.buffer)
        network.run()
        assert bytes(wire.decode.storage.buffer) == before
        assert wire.decode.receiver.counters.late_runs_total > 0
        assert wire.decode.finish_reasons("r") == {0: "abort"}


@pytest.mark.failure_edge("D aborts mid-transfer (push)")
def test_an_abort_with_a_writer_inside_holds_its_block_until_it_leaves() -> None:
    with ledger_pair(num_blocks=8) as (wire, network):
        submit(wire, request_of(), "p1")
        until_inside(wire, network)
        abort(wire.decode, "r")
        until(wire.prefill["p1"].is_idle, wire)
        assert (wire.decode.pool.num_quarantined, wire.decode.pool.num_held) == (1, 0)
        other = request_of(100, 9, "other")  # all blocks but the one in quarantine
        submit(wire, other)
        until(lambda: wire.decode.finish_reasons("other") != {}, wire)
        assert answer(wire, other) == ledger_answer(other)
        assert not wire.decode.is_idle()
        wire.is_slow = False
        settle(wire)


# ---- D refuses


@pytest.mark.failure_edge("D rejects (validation/model)")
def test_what_decode_refuses_never_reaches_prefill() -> None:
    """Push: D refuses before anything is asked of P, so there is nothing to release."""
    with ledger_pair(num_blocks=8) as (wire, _):
        submit(wire, request_of(200), "p1")
        wire.decode.turn()
        settle(wire)
        assert wire.decode.finish_reasons("r") == {0: "error"}
        assert not wire.passed


@pytest.mark.failure_edge("D full prefix hit")
def test_a_prompt_that_decode_holds_whole_is_released_without_a_block() -> None:
    """Push: D grants with nothing missing, P answers with the first token alone, and D ends the session."""
    first, second = request_of(64, name="a"), request_of(64, name="b")
    assert first.prompt_token_ids == second.prompt_token_ids
    with ledger_pair() as (wire, _):
        submit(wire, first, "p1")
        end_right(wire, first)
        num_sent = sender_of(wire.prefill["p1"]).counters.sent_runs_total
        submit(wire, second, "p1")
        end_right(wire, second)
        assert sender_of(wire.prefill["p1"]).counters.sent_runs_total == num_sent
        ends = [message for message in wire.passed if isinstance(message, EndPrefill)]
        assert [end.completed for end in ends] == [True, True]


@pytest.mark.failure_edge("D out of KV")
def test_prefill_waits_for_room_and_arrivals_stay_under_their_cap() -> None:
    requests = [request_of(60 + i, 10, "r" * (i + 1)) for i in range(8)]
    with ledger_pair(num_blocks=16, prefill={"num_blocks": 16}) as (wire, _):
        for request in requests:
            submit(wire, request, "p1")

        def held() -> int:
            return wire.decode.scheduler.num_undecoded_blocks

        def ended() -> bool:
            assert held() <= 8, "half the pool, and no session is larger"
            return all(wire.decode.finish_reasons(request.id) for request in requests)

        until(ended, wire)
        end_right(wire, *requests)
        assert wire.decode.stats.local_prefill_fallbacks_total == 0
        names = [type(message).__name__ for message in wire.passed]
        assert names.count("DeclinePrefill") >= 3
        assert names.count("GrantPrefill") == len(requests)


# ---- P ends, dies, comes back


@pytest.mark.failure_edge("P aborts mid-transfer")
@pytest.mark.parametrize("candidates", [("p1",), ("p1", "p2")], ids=["alone", "with next"])
def test_a_session_that_prefill_ends_half_way_is_computed_anew(candidates: tuple[str, ...]) -> None:
    """Push: D does not fail the request, it asks the next candidate or computes itself, and reads no partial KV."""
    request = request_of()
    with ledger_pair(*candidates) as (wire, network), simulated_clock() as clock:
        submit(wire, request, *candidates)
        until_inside(wire, network)
        # Nobody has renewed: P's lease runs out with blocks on their way.
        clock.now_ms += 30_001
        wire.prefill["p1"].turn()
        wire.turn()
        assert any(isinstance(message, RefusePrefill) for message in wire.passed)
        wire.is_slow = False
        end_right(wire, request)
        assert wire.decode.stats.sessions_failed_total >= 1


@pytest.mark.failure_edge("P dies before transfer")
@pytest.mark.parametrize("step", [CallPrefill, AnnouncePrefill, GrantPrefill])
def test_a_death_before_the_first_byte_costs_no_timeout(step: type) -> None:
    request = request_of()
    with ledger_pair() as (wire, _), simulated_clock() as clock:
        wire.is_slow = True
        submit(wire, request, "p1")
        until_said(wire, step)
        wire.cut("p1")
        end_right(wire, request)
        assert clock.now_ms == 0, "nothing waited for time to pass"
        assert wire.decode.stats.local_prefill_fallbacks_total == 1
        assert wire.decode.stats.computed_prompt_tokens_total == 70


@pytest.mark.failure_edge("P dies mid-transfer")
@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_death_with_a_run_half_written_leaves_nothing_of_it(is_noticed: bool) -> None:
    """The half run counts for nothing; where the link's end goes unnoticed, its block stays aside until it is."""
    request = request_of()
    with ledger_pair() as (wire, network):
        submit(wire, request, "p1")
        link = until_inside(wire, network)
        link.forward.clear()  # what P had not sent yet
        network.remove_sender(sender_of(wire.prefill["p1"]), is_noticed=is_noticed)
        wire.cut("p1")
        until(lambda: wire.decode.finish_reasons("r") != {}, wire)
        assert wire.decode.pool.num_quarantined == (not is_noticed)
        network.cut_for_receiver(link)
        end_right(wire, request)


@pytest.mark.failure_edge("P restarts on same address")
def test_nothing_of_a_former_life_reaches_the_session_of_the_next() -> None:
    request = request_of()
    with ledger_pair("p1") as (wire, network):
        submit(wire, request, "p1", "p1")
        link = until_inside(wire, network)
        former = wire.prefill["p1"]
        while sender_of(former).outbox.lanes[wire.decode.receiver.addresses[0]].has_runs():
            network.actions()[0]()  # all that the former life has is on its way
        network.remove_sender(sender_of(former), is_noticed=False)
        wire.cut("p1")
        wire.prefill["p1"] = EngineHarness(is_ledger=True, network=network)
        run_beside(wire, network, link, lambda: len(network.links) > 1)
        wire.is_slow = False
        end_right(wire, request)
        assert wire.decode.receiver.counters.late_runs_total > 0
        assert wire.decode.stats.sessions_completed_total == 1


@pytest.mark.failure_edge("P drains")
def test_a_prefill_worker_that_is_to_stop_ends_its_sessions_and_takes_no_more() -> None:
    first, second = request_of(name="a"), request_of(name="bb")
    with ledger_pair() as (wire, network):
        submit(wire, first, "p1")
        until_inside(wire, network)
        prefill = wire.prefill["p1"]
        prefill.inbox.post(Shutdown(drain_ms=60_000))
        submit(wire, second, "p1")
        until_said(wire, RefusePrefill)
        assert not prefill.core._may_stop()
        wire.is_slow = False
        end_right(wire, first, second)
        assert wire.decode.stats.sessions_completed_total == 1
        assert wire.decode.stats.local_prefill_fallbacks_total == 1
        prefill.core.run()  # at rest: it stops at once
        assert isinstance(prefill.said[-1], EngineStopped)


@pytest.mark.failure_edge("P drains")
def test_a_drain_is_bounded_whatever_decode_does() -> None:
    with ledger_pair() as (wire, network):
        submit(wire, request_of(), "p1")
        until_inside(wire, network)
        wire.held = True
        prefill = wire.prefill["p1"]
        prefill.inbox.post(Shutdown(drain_ms=100))
        prefill.core.run()
        assert isinstance(prefill.said[-1], EngineStopped)
        assert prefill.stats.num_open_sessions == 1
        wire.held = False
        wire.cut("p1")
        end_right(wire, request_of())


@pytest.mark.failure_edge("D dies holding P's lease")
def test_prefill_keeps_blocks_for_a_dead_decode_worker_until_its_lease_ends() -> None:
    with ledger_pair(session_lease_ms=3000) as (wire, network), simulated_clock() as clock:
        submit(wire, request_of(), "p1")
        until_inside(wire, network)
        prefill = wire.prefill["p1"]
        clock.now_ms = 2000
        wire.renew()
        prefill.turn()
        wire.held = True  # D is gone, and nobody says so
        clock.now_ms = 4900
        for _ in range(5):
            prefill.turn()
        assert prefill.pool.num_held == 5
        clock.now_ms = 5001
        turn_until(prefill.is_idle, prefill)
        wire.held = wire.is_slow = False
        end_right(wire, request_of())


# ---- completion


@pytest.mark.failure_edge("completion twice / late / never")
def test_completion_twice_and_late_changes_nothing() -> None:
    request = request_of()
    with ledger_pair() as (wire, _):
        submit(wire, request, "p1")
        until_said(wire, FirstTokens)
        (said,) = (message for message in wire.passed if isinstance(message, FirstTokens))
        key = (said.session_id, said.attempt)
        again = PrefillAnswered(*key, said.first_outputs, said.num_cached_tokens, said.sends_kv)
        for _ in range(4):
            wire.decode.inbox.post(again)
            wire.decode.inbox.post(SessionComplete(*key))
            wire.decode.turn()
            wire.turn()
        end_right(wire, request)
        assert wire.decode.stats.sessions_completed_total == 1


@pytest.mark.failure_edge("completion twice / late / never")
def test_what_a_given_up_attempt_still_says_is_not_taken_for_the_next() -> None:
    request = request_of()
    with ledger_pair("p1", "p2") as (wire, _):
        wire.is_slow = True
        submit(wire, request, "p1", "p2")
        until_said(wire, GrantPrefill)
        (key,) = wire.streams
        session = SessionId(key[0])
        wire.cut("p1")
        until(lambda: grants(wire) == [1, 2], wire)
        late = [
            *(RunAdmitted(session, 1, 0, position, 0, 3, True) for position in range(5)),
            SessionComplete(session, 1),
            PrefillAnswered(session, 1, [ChoiceOutput(request.id, 0, [1])], 0, True),
            ReceiveFailed(session, 1, TransferError("late")),
            PrefillLost(session, 1, "PeerLost", "late"),
            PrefillAnnounced(session, 1, 0, wire.decode.layout),
        ]
        for message in late:
            wire.decode.inbox.post(message)
        wire.decode.turn()
        assert (wire.decode.stats.num_arriving, wire.decode.stats.sessions_failed_total) == (1, 1)
        assert grants(wire) == [1, 2]
        wire.is_slow = False
        end_right(wire, request)
        assert wire.decode.stats.sessions_failed_total == 1


def grants(wire: Wire) -> list[int]:
    """The attempts that D has granted."""
    return [message.attempt for message in wire.passed if isinstance(message, GrantPrefill)]


@pytest.mark.failure_edge("completion twice / late / never")
def test_completion_that_never_comes_ends_at_the_timeout() -> None:
    request = request_of()
    with ledger_pair(prefill_timeout_ms=5000) as (wire, network), simulated_clock() as clock:
        network.inject(Fault.DROP, at_run=4)
        submit(wire, request, "p1")
        until_said(wire, FirstTokens)
        clock.now_ms = 4999
        for _ in range(5):
            wire.turn()
            wire.decode.turn()
        assert wire.decode.stats.num_arriving == 1
        clock.now_ms = 5001
        end_right(wire, request)
        assert wire.decode.stats.sessions_failed_total == 1


# ---- writes that come when they should not


@pytest.mark.failure_edge("a run doubled after a reconnect")
def test_a_run_that_is_sent_again_after_a_reconnect_is_written_once() -> None:
    request = request_of()
    with ledger_pair() as (wire, network):
        submit(wire, request, "p1")
        until_inside(wire, network)
        link = network.links[0]
        while wire.decode.receiver.counters.admitted_runs_total < 3:
            link.deliver()
        network.cut(link)  # D has them, P's answers are lost
        wire.is_slow = False
        end_right(wire, request)
        assert wire.decode.receiver.counters.duplicate_runs_total == 3
        assert wire.decode.stats.sessions_completed_total == 1


@pytest.mark.failure_edge("a slow first P writes after D tried the next candidate")
def test_a_slow_first_prefill_worker_writes_nowhere_once_the_next_is_asked() -> None:
    request = request_of(max_tokens=30)
    with ledger_pair("p1", "p2", num_blocks=10) as (wire, network):
        submit(wire, request, "p1", "p2")
        slow = until_inside(wire, network)
        (key,) = wire.streams
        wire._lose(key, "PeerLost", "no sign of it")  # D alone: P goes on sending
        until(lambda: wire.decode.pool.num_quarantined == 1, wire)
        run_beside(wire, network, slow, lambda: len(wire.decode.tokens("r")) >= 5)
        while slow.can_deliver:
            slow.deliver()
            wire.decode.turn()
        wire.lose_streams("p1")
        for engine in wire.prefill.values():
            engine.turn()
        wire.is_slow = False
        end_right(wire, request)
        assert wire.decode.receiver.counters.late_runs_total > 0
        assert wire.decode.stats.sessions_completed_total == 1


@pytest.mark.failure_edge("a late copy of the tail block after decode wrote to it")
def test_a_late_copy_of_the_tail_does_not_undo_what_decode_wrote() -> None:
    request = request_of(max_tokens=40)
    with ledger_pair() as (wire, network):
        submit(wire, request, "p1")
        wire.is_slow = True
        until_said(wire, FirstTokens)
        address = wire.decode.receiver.addresses[0]
        lane = sender_of(wire.prefill["p1"]).outbox.lanes[address]
        while lane.has_runs():
            sender_of(wire.prefill["p1"]).send(lane)
        (late,) = network.links
        network.cut_for_sender(late)  # half open: P sends all of it again on another connection
        run_beside(wire, network, late, lambda: len(wire.decode.tokens("r")) >= 8)
        while late.can_deliver:
            late.deliver()
            wire.decode.turn()
        wire.is_slow = False
        end_right(wire, request)
        assert wire.decode.receiver.counters.late_runs_total == 15


def run_beside(wire: Wire, network: FakeNetwork, still: FakeLink, done: Callable[[], bool]) -> None:
    """Let everything happen but what comes over one link."""

    def step() -> bool:
        actions = [action for action in network.actions() if action != still.deliver]
        for action in actions[:1]:
            action()
        return done()

    until(step, wire)
