"""A run that another worker began goes on as if it had never stopped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.engines import make_request, run_alone
from tests.support.scenes import random_prompt

NUM_TOKENS = 24

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9},
    "few likely ones": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("cuts", [(1, 1), (9, 9), (23, 1), (4, 0), (24, 12)], ids=str)
def test_the_tokens_that_are_left_are_those_of_the_whole_run(
    name: str, cuts: tuple[int, int]
) -> None:
    """Two choices that have come differently far; one may have nothing yet, or all."""
    sampling = SAMPLINGS[name]
    num_choices = 2 if sampling else 1
    request = make_request("r", random_prompt(50), max_tokens=NUM_TOKENS, n=num_choices, **sampling)
    whole = run_alone(request)
    had = tuple(tuple(tokens[:cut]) for tokens, cut in zip(whole, cuts, strict=False))
    left = run_alone(replace(request, output_token_ids=had))
    assert left == [tokens[len(part) :] for tokens, part in zip(whole, had, strict=True)]
    assert all(len(tokens) == NUM_TOKENS for tokens in whole)
