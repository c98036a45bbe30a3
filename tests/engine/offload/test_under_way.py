"""What happens to others, and afterwards, while blocks are on their way to and from tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from core.events import Tier
from engine.messages import AddRequest, ResetPrefixCache
from engine.offload_config import OffloadConfig
from engine.sequence import start_sequences
from kvtransfer.tiers.base import Placement
from tests.support.engines import EngineHarness, abort, make_request, turn_until
from tests.support.ledger_model import VOCAB_SIZE, ledger_answer
from tests.support.memory_store import MemoryServer, MemoryStore

MIB = 1 / 1024
PROMPTS = {
    name: [(number * (start + 2) + start) % VOCAB_SIZE for number in range(100)]
    for start, name in enumerate("abcdef")
}
PATIENT = 1e6
"""Seconds that computing a token is taken to cost: whatever a load takes is faster."""


@contextmanager
def engine(num_blocks: int = 16, block_size: int = 16, **offload: Any) -> Iterator[EngineHarness]:
    harness = EngineHarness(
        num_blocks=num_blocks,
        block_size=block_size,
        is_ledger=True,
        offload=OffloadConfig(**({"size": 4 * MIB} | offload)),
    )
    harness.core._offload.loads._compute_s_a_token = PATIENT
    try:
        yield harness
    finally:
        harness.close()


class Gate:
    """Holds a tier's reads or writes until they are let through."""

    def __init__(self, harness: EngineHarness, what: str) -> None:
        self.num_begun = 0
        self._permits = threading.Semaphore(0)
        tier = harness.tiers.tier(Tier.HOST)
        call: Callable[..., Any] = getattr(tier, what)

        def gated(placement: Placement, block: memoryview) -> Any:
            self.num_begun += 1
            assert self._permits.acquire(timeout=20)
            return call(placement, block)

        setattr(tier, what, gated)

    def let(self, num_blocks: int = 1000) -> None:
        self._permits.release(num_blocks)


def post(harness: EngineHarness, name: str, prompt: list[int], max_tokens: int = 8) -> None:
    harness.inbox.post(AddRequest(make_request(name, prompt, max_tokens=max_tokens)))


def finish(harness: EngineHarness, *names: str) -> None:
    turn_until(lambda: all(harness.finish_reasons(name) for name in names), harness)


def run(harness: EngineHarness, name: str, prompt: list[int]) -> int:
    """A right answer; how many tokens of its prompt were found."""
    post(harness, name, prompt)
    finish(harness, name)
    turn_until(harness.is_idle, harness)
    assert [harness.tokens(name)] == ledger_answer(make_request(name, prompt))
    return num_cached(harness, name)


def num_cached(harness: EngineHarness, name: str) -> int:
    (found,) = [
        o.num_cached_tokens for o in harness.outputs[name] if o.num_cached_tokens is not None
    ]
    return found


def eviction_order(harness: EngineHarness, prompt: list[int]) -> list[int]:
    """The places in a prompt's chain of its blocks in the free queue, next to be evicted first."""
    (sequence,) = start_sequences(make_request("probe", prompt))
    harness.scheduler.kv.attach(sequence)
    places = {c.key: n for n, c in enumerate(harness.scheduler.kv.contents(sequence))}
    queued = harness.pool.next_evicted(harness.pool.num_usable)
    return [places[held.content.key] for held in queued if held.content.key in places]


# ---------------------------------------------------------------- loads


def test_blocks_are_copied_before_anybody_else_takes_blocks() -> None:
    """Whoever is copied from may be free; announcements begin loads, and movers write at once."""
    prompt = PROMPTS["a"]
    with engine(num_blocks=40) as harness:
        run(harness, "a", prompt)
        order: list[str] = []
        copies: list[int] = []
        runner, sessions = harness.core._runner, harness.core._prefill_side
        copy_blocks, announce_next = runner.copy_blocks, sessions.announce_next

        def copy(pairs: list[tuple[int, int]]) -> None:
            order.append("copy")
            copies.append(len(pairs))
            copy_blocks(pairs)

        def announce() -> None:
            order.append("announce")
            announce_next()

        runner.copy_blocks, sessions.announce_next = copy, announce
        run(harness, "b", [*prompt[:24], *range(1, 20)])
        assert 1 in copies
        assert order == ["copy", "announce"] * (len(order) // 2)


def test_a_load_gives_way_to_whoever_runs() -> None:
    """The first in order is never set back by what is read for a later one."""
    with engine(num_blocks=15) as harness:
        for name in "abcd":
            run(harness, name, PROMPTS[name])
        reads = Gate(harness, "read")
        post(harness, "first", PROMPTS["e"], max_tokens=60)
        turn_until(lambda: len(harness.tokens("first")) > 2, harness)
        post(harness, "later", PROMPTS["a"])
        turn_until(lambda: reads.num_begun == 1, harness)
        finish(harness, "first")
        assert harness.stats.preemptions_total == 0
        reads.let()
        finish(harness, "later")
        turn_until(harness.is_idle, harness)
        for name, prompt, length in (("first", "e", 60), ("later", "a", 8)):
            request = make_request(name, PROMPTS[prompt], max_tokens=length)
            assert [harness.tokens(name)] == ledger_answer(request)


def test_a_reset_ends_what_is_being_read() -> None:
    with engine() as harness:
        for name in "abcd":
            run(harness, name, PROMPTS[name])
        reads = Gate(harness, "read")
        post(harness, "again", PROMPTS["a"])
        turn_until(lambda: reads.num_begun == 1, harness)
        harness.inbox.post(ResetPrefixCache())
        harness.turn()
        reads.let()
        finish(harness, "again")
        turn_until(harness.is_idle, harness)
        assert num_cached(harness, "again") == 0
        assert [harness.tokens("again")] == ledger_answer(make_request("again", PROMPTS["a"]))


# ---------------------------------------------------------------- stores


def test_a_reset_takes_what_is_being_stored_along() -> None:
    with engine(num_blocks=40) as harness:
        writes = Gate(harness, "write")
        post(harness, "a", PROMPTS["a"])
        finish(harness, "a")
        harness.inbox.post(ResetPrefixCache())
        harness.turn()
        writes.let()
        turn_until(harness.is_idle, harness)
        assert run(harness, "again", PROMPTS["a"]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_child_leaves_before_its_parent_however_late_a_store_ends(seed: int) -> None:
    with engine(num_blocks=40) as harness:
        writes = Gate(harness, "write")
        post(harness, "a", PROMPTS["a"])
        finish(harness, "a")
        writes.let(1 + seed)
        time.sleep(0.01)
        harness.turn()
        writes.let()
        turn_until(harness.is_idle, harness)
        assert eviction_order(harness, PROMPTS["a"]) == [5, 4, 3, 2, 1, 0]


def test_what_is_used_while_it_is_stored_lazily_keeps_its_place() -> None:
    with engine(num_blocks=16, store="lazy") as harness:
        run(harness, "a", PROMPTS["a"])
        writes = Gate(harness, "write")
        run_only = ("b", PROMPTS["b"])
        post(harness, *run_only)
        finish(harness, "b")
        turn_until(lambda: writes.num_begun >= 1, harness)  # of a's blocks, which come next
        post(harness, "a again", PROMPTS["a"])
        finish(harness, "a again")
        writes.let()
        turn_until(harness.is_idle, harness)
        next_out = harness.pool.next_evicted(harness.pool.num_usable)
        (sequence,) = start_sequences(make_request("probe", PROMPTS["a"]))
        harness.scheduler.kv.attach(sequence)
        used = {content.key for content in harness.scheduler.kv.contents(sequence)}
        assert [held.content.key in used for held in next_out][-6:] == [True] * 6


def test_a_lazy_store_leaves_alone_what_is_far_from_eviction() -> None:
    with engine(num_blocks=60, store="lazy") as harness:
        run(harness, "a", PROMPTS["a"])
        run(harness, "again", PROMPTS["a"])
        assert harness.stats.tiers[0].stored_blocks_total == 0


# ---------------------------------------------------------------- a store that is shared


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> MemoryServer:
    """What every remote address leads to."""
    server = MemoryServer()
    monkeypatch.setattr("kvtransfer.tiers.remote.open.open_store", lambda url: MemoryStore(server))
    return server


@pytest.mark.parametrize("end", ["nothing is found", "the leader is aborted", "the leader loads"])
def test_whoever_follows_a_question_goes_on_whatever_comes_of_it(
    end: str, server: MemoryServer
) -> None:
    remote = {"size": 0.0, "remote_url": "redis://anywhere:1"}
    if end == "the leader loads":
        with engine(num_blocks=32, **remote) as harness:
            run(harness, "elsewhere", PROMPTS["a"])
    with engine(num_blocks=32, **remote) as harness:
        asked = threading.Event()
        server.before = lambda call: asked.wait(20) if call == "exist" else None  # type: ignore[assignment]
        for name in ("one", "two"):
            post(harness, name, PROMPTS["a"])
        turn_until(lambda: harness.scheduler.num_loading == 2, harness)
        if end == "the leader is aborted":
            abort(harness, "one")
        asked.set()
        finish(harness, "one", "two")
        turn_until(harness.is_idle, harness)
        assert [harness.tokens("two")] == ledger_answer(make_request("two", PROMPTS["a"]))


def test_a_store_that_answers_late_is_not_asked_what_nobody_waits_for(server: MemoryServer) -> None:
    remote = {"size": 0.0, "remote_url": "redis://anywhere:1"}
    with engine(num_blocks=64, **remote) as harness:
        harness.core._offload.loads._compute_s_a_token = 1e-6  # nobody waits long for an answer
        asked: list[str] = []
        answer = threading.Event()

        def slow(call: str) -> None:
            if call == "exist":
                asked.append(call)
                assert answer.wait(20)

        server.before = slow  # type: ignore[assignment]
        for name, prompt in PROMPTS.items():
            post(harness, name, prompt)
        finish(harness, *PROMPTS)
        num_open = harness.core._offload.loads.num_open
        post(harness, "later", PROMPTS["a"][:50] + PROMPTS["b"][:30])
        finish(harness, "later")
        assert harness.core._offload.loads.num_open == num_open  # it was not even tried
        answer.set()
        turn_until(harness.is_idle, harness)
        assert len(asked) == 1
