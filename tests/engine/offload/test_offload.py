"""An engine whose pool is small goes on from its tiers as if it were large: same tokens, less computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.messages import AddRequest
from engine.offload_config import OffloadConfig
from tests.support.engines import EngineHarness, make_request, run_alone, turn_until

MIB = 1 / 1024
PROMPTS = {
    name: [(number * (start + 2) + start) % 97 for number in range(100)]
    for start, name in enumerate("abcdef")
}


@contextmanager
def engine(
    num_blocks: int = 16, *, is_staged: bool = False, **offload: Any
) -> Iterator[EngineHarness]:
    """Its pool holds the KV of two prompts and their answers, no more."""
    values = {"size": 4 * MIB} | offload
    harness = EngineHarness(
        num_blocks=num_blocks, is_staged=is_staged, offload=OffloadConfig(**values)
    )
    try:
        yield harness
    finally:
        harness.close()


def run(harness: EngineHarness, name: str, prompt: list[int], **sampling: Any) -> list[int]:
    request = make_request(name, prompt, **sampling)
    harness.inbox.post(AddRequest(request))
    turn_until(lambda: bool(harness.finish_reasons(name)), harness)
    turn_until(harness.is_idle, harness)
    assert set(harness.finish_reasons(name).values()) == {"length"}
    return harness.tokens(name)


def alone(prompt: list[int], **sampling: Any) -> list[int]:
    (tokens,) = run_alone(make_request("alone", prompt, **sampling))
    return tokens


@pytest.mark.parametrize("is_staged", [False, True], ids=["one memory", "staged"])
def test_what_the_pool_lost_comes_back_from_the_host(is_staged: bool) -> None:
    with engine(is_staged=is_staged) as harness:
        for name, prompt in PROMPTS.items():
            assert run(harness, name, prompt) == alone(prompt)
        computed = harness.stats.computed_prompt_tokens_total
        assert run(harness, "again", PROMPTS["a"]) == alone(PROMPTS["a"])
        assert harness.stats.computed_prompt_tokens_total - computed == 4  # 100 less 6 blocks of 16
        assert harness.stats.tier_hits_total == 96
        (outputs,) = [o for o in harness.outputs["again"] if o.num_cached_tokens is not None]
        assert outputs.num_cached_tokens == 96
