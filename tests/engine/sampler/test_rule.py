"""The sampler against a plain statement of its rule, and against the probabilities that it must have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import SamplingParams
from engine.sampler.rows import SampleRow
from engine.sampler.sampler import Sampler
from kernels.reference.philox import uniforms

VOCAB = 700  # three blocks of the fold, the last one partly filled


def make_params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 11, "temperature": 1.0, "max_tokens": 64, **values})


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def choose(logits: torch.Tensor, params: SamplingParams, position: int = 0, **row: Any) -> int:
    (token,) = Sampler().sample(logits, [SampleRow(0, params, position, **row)])
    return token.token_id


def by_the_rule(logits: list[float], params: SamplingParams, position: int) -> int:
    """The rule in words: weights, filters, then the first id whose running sum exceeds u x total."""
    top = max(logits)
    weights = [math.exp((x - top) / params.temperature) for x in logits]
    kept = [w if w >= params.min_p else 0.0 for w in weights]
    if params.top_k:
        least = sorted(logits)[-min(params.top_k, len(logits))]
        kept = [w if x >= least else 0.0 for w, x in zip(kept, logits, strict=True)]
    if params.top_p < 1.0:
        total, running, least_kept = sum(kept), 0.0, 0.0
        for weight in sorted(kept, reverse=True):
            running += weight
            least_kept = weight
            if running >= params.top_p * total:
                break
        kept = [w if w >= least_kept else 0.0 for w in kept]
    limit = uniforms([params.seed], [position], [0]).item() * sum(kept)
    running = 0.0
    for token_id, weight in enumerate(kept):
        running += weight
        if running > limit:
            return token_id
    raise AssertionError("no id exceeds the limit")


@settings(max_examples=60)
@given(
    st.integers(0, 10_000),
    st.integers(0, 2**64 - 1),
    st.integers(0, 500),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 5, 60]),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_the_sampler_follows_the_rule(
    logits_seed: int,
    seed: int,
    position: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    logits = logits_of(logits_seed)
    params = make_params(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = by_the_rule(logits[0].tolist(), params, position)
    assert choose(logits, params, position) == expected


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [400, 7, 650]] = 5.0
    assert choose(logits, make_params(temperature=0.0)) == 7


def test_a_row_is_chosen_alike_in_any_company() -> None:
    logits = logits_of(3, rows=20)
    rows = [
        SampleRow(
            i, make_params(seed=i, temperature=[0.0, 0.7][i % 2], top_k=i), i, logits_row_choice
        )
        for i, logits_row_choice in enumerate([0] * 20)
    ]
    together = [token.token_id for token in Sampler().sample(logits, rows)]
    alone = [
        Sampler().sample(logits[i : i + 1], [row._replace(logits_row=0)])[0].token_id
        for i, row in enumerate(rows)
    ]
    assert together == alone


def test_frequencies_are_the_probabilities() -> None:
    """Chi-square over 4,000 positions of one seed, six ids: the bound is passed by chance once in 100,000."""
    logits = torch.full((1, VOCAB), -40.0)
    logits[0, :6] = torch.tensor([0.0, 0.5, 1.0, -1.0, 0.2, -0.5])
    probabilities = logits[0, :6].double().softmax(0).tolist()
    rows = [SampleRow(0, make_params(), position) for position in range(4000)]
    tokens = [token.token_id for token in Sampler().sample(logits, rows)]
    counts = [tokens.count(i) for i in range(6)]
    assert sum(counts) == 4000
    chi_square = sum(
        (count - 4000 * p) ** 2 / (4000 * p) for count, p in zip(counts, probabilities, strict=True)
    )
    assert chi_square < 30.9


@pytest.mark.parametrize(
    ("params", "history", "expected"),
    [
        ({"logit_bias": ((9, 100.0),)}, {}, 9),
        ({"repetition_penalty": 10.0}, {"prompt_token_ids": [5]}, 6),
        ({"presence_penalty": 2.0}, {"output_token_ids": [5]}, 6),
        ({"frequency_penalty": 1.0}, {"output_token_ids": [5, 5]}, 6),
        ({"presence_penalty": 2.0}, {"prompt_token_ids": [5]}, 5),
        ({}, {"banned_token_ids": [5, 6]}, 4),
    ],
    ids=["bias", "repetition", "presence", "frequency", "presence ignores prompt", "ban"],
)
def test_what_adjusts_a_greedy_choice(
    params: dict[str, Any], history: dict[str, list[int]], expected: int
) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 5, 6]] = torch.tensor([8.0, 10.0, 9.0])
    assert choose(logits, make_params(temperature=0.0, **params), **history) == expected


def test_a_ban_on_every_id_bans_none() -> None:
    logits = logits_of(1)
    everything = list(range(VOCAB))
    token = choose(logits, make_params(temperature=0.0), banned_token_ids=everything)
    assert token == int(logits[0].argmax())


def test_logprobs_are_of_the_model_itself() -> None:
    logits = logits_of(5)
    row = SampleRow(0, make_params(temperature=0.0, logprobs=3, logit_bias=((0, 100.0),)), 0)
    (token,) = Sampler().sample(logits, [row])
    expected = logits[0].double().log_softmax(0)
    assert token.token_id == 0
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(expected[0].item(), abs=1e-5)
    best = expected.topk(3)
    assert token.logprobs.top_token_ids == best.indices.tolist()
    assert token.logprobs.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)
    assert token.logprobs.rank == 1 + int((expected > expected[0]).sum())
