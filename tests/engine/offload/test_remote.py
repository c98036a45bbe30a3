"""Engines that share a store: what one has computed, another one reads; and a store that is away is no store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from core.events import Tier
from engine.messages import AddRequest
from engine.offload_config import OffloadConfig
from tests.support.engines import EngineHarness, make_request, turn_until
from tests.support.ledger_model import VOCAB_SIZE, ledger_answer
from tests.support.valkey import running_valkey

PROMPT = [(7 * number) % VOCAB_SIZE for number in range(100)]
NUM_CACHED = 96


@contextmanager
def engine(url: str, size: float = 0.0) -> Iterator[EngineHarness]:
    offload = OffloadConfig(size=size, remote_url=url, remote_size=0.01)
    harness = EngineHarness(num_blocks=20, is_ledger=True, offload=offload)
    try:
        yield harness
    finally:
        harness.close()


def ask(harness: EngineHarness, name: str, prompt: list[int] | None = None) -> int:
    """A right answer; how many tokens of its prompt were found."""
    request = make_request(name, prompt or PROMPT, max_tokens=5)
    harness.inbox.post(AddRequest(request))
    turn_until(lambda: bool(harness.finish_reasons(name)), harness)
    turn_until(harness.is_idle, harness)
    assert [harness.tokens(name)] == ledger_answer(request)
    (found,) = [
        o.num_cached_tokens for o in harness.outputs[name] if o.num_cached_tokens is not None
    ]
    return found


def test_what_one_engine_computed_another_one_reads() -> None:
    with running_valkey() as server, engine(server.url) as one, engine(server.url) as other:
        assert ask(one, "cold") == 0
        assert ask(other, "first here") == NUM_CACHED
        assert other.stats.computed_prompt_tokens_total == len(PROMPT) - NUM_CACHED
        assert other.stats.tier_hits_total == NUM_CACHED
        other.pool.reset_prefix_cache()
        assert ask(other, "again") == NUM_CACHED  # known by now, so not asked for


def test_a_longer_prompt_takes_what_there_is() -> None:
    with running_valkey() as server, engine(server.url) as one, engine(server.url) as other:
        ask(one, "cold")
        assert ask(other, "longer", [*PROMPT[:70], *range(40)]) == 64


def test_the_host_comes_first_and_the_store_for_the_rest() -> None:
    with running_valkey() as server, engine(server.url) as one, engine(server.url, 0.01) as other:
        ask(one, "cold")
        ask(other, "half", PROMPT[:50])
        other.pool.reset_prefix_cache()
        other.tiers.tier(Tier.REMOTE).clear()
        assert ask(other, "whole") == NUM_CACHED
        host, remote = other.stats.tiers
        assert (host.loaded_blocks_total, remote.loaded_blocks_total) == (3, 3 + 3)


@pytest.mark.public_case("B35")
@pytest.mark.failure_edge("tier read fails or is corrupt")
def test_a_store_that_is_stopped_is_a_miss_and_hits_return_with_it(held_port: int) -> None:
    with engine(f"redis://127.0.0.1:{held_port}") as harness:
        with running_valkey(port=held_port):
            assert ask_until_found(harness) == NUM_CACHED  # it was away when the engine started
        for name in ("away", "still away"):
            harness.pool.reset_prefix_cache()
            assert ask(harness, name) == 0
        figures = harness.stats.tiers[0].policy
        assert figures["store_failures_total"] + figures["missing_blocks_total"] > 0
        with running_valkey(port=held_port):
            assert ask_until_found(harness) == NUM_CACHED


def ask_until_found(harness: EngineHarness) -> int:
    """Again and again without the pool, which computes and stores meanwhile; the tokens found at last."""
    found, deadline = 0, time.monotonic() + 20
    while not found and time.monotonic() < deadline:
        harness.pool.reset_prefix_cache()
        found = ask(harness, f"asked at {time.monotonic()}")
    return found
