"""Split serving where movers have a memory of their own: the tokens of one engine alone, whatever goes wrong.

Both memories are the host's here and hold NaN at first, so bytes that were not brought across are seen in the answer.
"""

from __future__ import annotations

import pytest

from tests.support.engines import make_request, run_alone, turn_until
from tests.support.scenes import (
    answer,
    random_prompt,
    run_random_mix,
    run_to_end,
    split_pair,
    submit,
)

STAGED = {"is_staged": True}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(STAGED, STAGED), (STAGED, {}), ({}, STAGED)],
    ids=["both", "prefill", "decode"],
)
@pytest.mark.parametrize("length", [1, 16, 33, 100])
def test_a_split_answer_is_the_answer_of_one_engine_alone(
    length: int, prefill: dict[str, bool], decode: dict[str, bool]
) -> None:
    """Twice: the second time from blocks that both sides hold, and with a tail of its own."""
    requests = [
        make_request("a", random_prompt(length), max_tokens=12, n=2, temperature=0.9),
        make_request("b", [*random_prompt(length), 3, 1, 4], max_tokens=12),
    ]
    with split_pair(prefill=prefill, **decode) as wire:
        for request in requests:
            submit(wire, request, "p1")
            run_to_end(wire, request)
            assert answer(wire, request) == run_alone(request)
        assert wire.decode.stats.sessions_completed_total == 2
        assert wire.decode.stats.computed_prompt_tokens_total == 0


@pytest.mark.parametrize("candidates", [("p1",), ("p1", "p2")], ids=["alone", "with next"])
def test_blocks_that_were_whole_before_a_loss_are_used(candidates: tuple[str, ...]) -> None:
    """They are read here, or by the next attempt, although their session never completed."""
    request = make_request("r", random_prompt(160), max_tokens=6)
    prefill = {"link_rate_bytes_s": 100_000.0, **STAGED}
    with split_pair(*candidates, prefill=prefill, **STAGED) as wire:
        submit(wire, request, *candidates)
        acknowledged = lambda: (  # noqa: E731
            wire.prefill["p1"].senders.counters.blocks_acknowledged_total >= 2
        )
        turn_until(acknowledged, wire, wire.decode, *wire.prefill.values())
        wire.cut("p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert wire.decode.stats.computed_prompt_tokens_total <= 160 - 32


@pytest.mark.parametrize("seed", range(4))
def test_random_mixes_of_requests_aborts_and_losses_end_right(seed: int) -> None:
    run_random_mix(seed, **STAGED)
