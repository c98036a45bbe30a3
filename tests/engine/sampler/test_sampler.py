"""The sampler's promises: rows do not depend on company, parameters do what their names say, vectors stay."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from core.request import SamplingParams
from engine.sampler.rows import SampleRow
from engine.sampler.sampler import Sampler


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "temperature": 0.0, "max_tokens": 100, **settings})


def formula_logits(num_rows: int, vocab_size: int = 600) -> torch.Tensor:
    """Logits that any language computes alike: multiples of 1/128, exact in float32."""
    values = [
        [((row * 7919 + token * 104729) % 1009 - 504) / 128 for token in range(vocab_size)]
        for row in range(num_rows)
    ]
    return torch.tensor(values)


def tokens(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [sampled.token_id for sampled in Sampler().sample(logits, rows)]


def one(logits: list[float], position: int = 0, choice: int = 0, **settings: Any) -> int:
    history = {key: settings.pop(key) for key in list(settings) if key.endswith("_token_ids")}
    row = SampleRow(0, params(**settings), position, choice, **history)
    return tokens(torch.tensor([logits]), [row])[0]


def random_row(logits_row: int, chooser: random.Random) -> SampleRow:
    history = [chooser.randrange(600) for _ in range(30)]
    settings = params(
        seed=chooser.getrandbits(64),
        temperature=chooser.choice([0.0, 0.0, 0.005, 0.7, 1.3]),
        top_k=chooser.choice([0, 0, 7]),
        top_p=chooser.choice([1.0, 0.9]),
        min_p=chooser.choice([0.0, 0.02]),
        repetition_penalty=chooser.choice([1.0, 1.2]),
        frequency_penalty=chooser.choice([0.0, 0.4]),
        presence_penalty=chooser.choice([0.0, -0.3]),
        logprobs=chooser.choice([None, None, 0, 3]),
        logit_bias=chooser.choice([(), ((5, 4.0), (17, -90.0))]),
    )
    banned = chooser.choice([(), (0, 2)])
    position = chooser.randrange(50)
    return SampleRow(logits_row, settings, position, 0, history[:10], history[10:], banned)


def test_a_row_gets_the_same_answer_alone_and_in_any_company() -> None:
    chooser = random.Random(3)
    logits = formula_logits(40)
    rows = [random_row(index, chooser) for index in range(40)]
    together = Sampler().sample(logits, rows)
    for _ in range(3):
        order = chooser.sample(range(40), 40)
        size = chooser.randrange(1, 40)
        shuffled = Sampler().sample(logits, [rows[index] for index in order[:size]])
        assert shuffled == [together[index] for index in order[:size]]
    for index in (0, 7, 39):
        assert Sampler().sample(logits, [rows[index]]) == [together[index]]


def test_logits_are_not_changed() -> None:
    chooser = random.Random(5)
    logits = formula_logits(20)
    before = logits.clone()
    Sampler().sample(logits, [random_row(index, chooser) for index in range(20)])
    assert torch.equal(logits, before)


def test_several_choices_of_one_row_draw_their_own_numbers() -> None:
    rows = [SampleRow(1, params(temperature=1.5), 0, choice) for choice in range(30)]
    drawn = tokens(formula_logits(2), rows)
    assert len(set(drawn)) > 5
    again = [SampleRow(0, params(temperature=1.5), 0, choice) for choice in range(30)]
    assert tokens(formula_logits(2)[1:], again) == drawn


def test_no_rows_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, 10), []) == []


def test_frozen_tokens() -> None:
    """A change here changes the answers of seeded requests: of split, migrated and preempted runs mid-way."""
    logits = formula_logits(4)
    settings = [
        params(),
        params(seed=42, temperature=1.0),
        params(seed=42, temperature=0.7, top_p=0.9),
        params(seed=2**64 - 1, temperature=1.8, top_k=40, min_p=0.01),
    ]
    drawn = [
        tokens(logits, [SampleRow(row, each, position, 1) for position in range(8)])
        for row, each in enumerate(settings)
    ]
    assert drawn == FROZEN


FROZEN = [
    [39, 39, 39, 39, 39, 39, 39, 39],
    [165, 92, 34, 326, 438, 53, 11, 14],
    [184, 101, 38, 335, 433, 62, 14, 23],
    [349, 349, 110, 505, 110, 37, 539, 456],
]


# ---------------------------------------------------------------- parameters


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert one([1.0, 3.0, 3.0, 2.0]) == 1


def test_tiny_temperatures_are_raised() -> None:
    """Two tokens 0.01 apart: at 0.01 the second has 27 % of the draws; at 0.005 it would have 12 %."""
    rows = torch.tensor([[0.0, -0.01]]).expand(400, -1)

    def drawn(temperature: float) -> list[int]:
        settings = params(temperature=temperature)
        return tokens(rows, [SampleRow(i, settings, output_position=i) for i in range(400)])

    assert drawn(0.005) == drawn(1e-9) == drawn(0.01) != drawn(0.02)
    assert 90 < sum(drawn(0.005)) < 125


def test_bias_moves_greedy_choice() -> None:
    assert one([1.0, 2.0, 0.0], logit_bias=((2, 5.0),)) == 2
    assert one([1.0, 2.0, 0.0], logit_bias=((1, -100.0),)) == 0
    assert one([1.0, 2.0], logit_bias=((1, -0.5), (0, 1.0))) == 0
    assert one([1.0, 2.0], logit_bias=((7, 50.0),)) == 1, "an id the model lacks names no logit"


def test_banned_and_allowed_tokens() -> None:
    assert one([1.0, 3.0, 2.0], banned_token_ids=(1,)) == 2
    assert one([1.0, 3.0, 2.0], banned_token_ids=(1, 2, 99)) == 0
    assert one([1.0, 3.0, 2.0], allowed_token_ids=(0, 2)) == 2
    assert one([1.0, 3.0, 2.0], allowed_token_ids=(0, 1), banned_token_ids=(1,)) == 0


def test_repetition_penalty_counts_prompt_and_output() -> None:
    assert one([2.0, 1.9], repetition_penalty=1.5, prompt_token_ids=(0,)) == 1
    assert one([2.0, 1.9], repetition_penalty=1.5, output_token_ids=(0,)) == 1
    assert one([2.0, 1.9], repetition_penalty=1.5, prompt_token_ids=(0, 1)) == 0
    assert one([-1.0, -1.2], repetition_penalty=1.5, prompt_token_ids=(0,)) == 1


def test_frequency_and_presence_count_the_output_only() -> None:
    assert one([2.0, 1.5], frequency_penalty=0.3, output_token_ids=(0,)) == 0
    assert one([2.0, 1.5], frequency_penalty=0.3, output_token_ids=(0, 0)) == 1
    assert one([2.0, 1.5], presence_penalty=0.6, output_token_ids=(0,)) == 1
    assert one([2.0, 1.5], presence_penalty=0.3, output_token_ids=(0, 0, 0)) == 0
    assert one([2.0, 1.5], presence_penalty=2.0, prompt_token_ids=(0,)) == 0
    assert one([2.0, 2.5], frequency_penalty=-1.0, output_token_ids=(0,)) == 0


def test_bias_comes_before_penalties() -> None:
    """Biased to 4, then halved: 2 is below 2.5. Halved first it would be 1 + 2 = 3 and win."""
    settings = {"logit_bias": ((0, 2.0),), "repetition_penalty": 2.0, "prompt_token_ids": (0,)}
    assert one([2.0, 2.5], **settings) == 1


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_of_the_model_not_of_the_adjusted_row() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    settings = params(temperature=0.5, logprobs=2, logit_bias=((0, 100.0),), top_k=1)
    (sampled,) = Sampler().sample(logits, [SampleRow(0, settings, 0)])
    assert sampled.token_id == 0
    assert sampled.logprobs is not None
    expected = logits[0].double().log_softmax(-1).tolist()
    assert sampled.logprobs.logprob == pytest.approx(expected[0], abs=1e-12)
    assert sampled.logprobs.rank == 3
    assert sampled.logprobs.top_token_ids == [1, 2]
    assert sampled.logprobs.top_logprobs == pytest.approx([expected[1], expected[2]], abs=1e-12)


@pytest.mark.parametrize(("logprobs", "num_top"), [(0, 0), (2, 2), (20, 4)])
def test_as_many_alternatives_as_asked_for(logprobs: int, num_top: int) -> None:
    rows = [SampleRow(0, params(logprobs=logprobs), 0), SampleRow(0, params(), 0)]
    first, second = Sampler().sample(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), rows)
    assert first.logprobs is not None
    assert len(first.logprobs.top_token_ids) == len(first.logprobs.top_logprobs) == num_top
    assert second.logprobs is None
