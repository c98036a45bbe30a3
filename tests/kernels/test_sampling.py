"""The sampling rule: each step against a plain restatement, ties, bits that do not depend on company, frequencies."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from kernels.reference import sampling
from kernels.reference.philox import uniforms
from kernels.workspace import Workspace
from tests.support.sampling_rule import restated_draw

VOCAB_SIZES = [1, 5, 255, 256, 257, 1000, 1024]


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def draw_one(
    logits: Tensor,
    u: float,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    number = torch.tensor([u], dtype=torch.float64)
    rows = logits.view(1, -1)
    drawn = sampling.draw(rows, number, [temperature], [top_k], [top_p], [min_p], Workspace())
    return int(drawn[0])


def kept_ids(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    num_draws: int = 1000,
) -> set[int]:
    """Ids that some number on a fine grid draws."""
    grid = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    rows = logits.expand(num_draws, -1)
    lists = [temperature] * num_draws, [top_k] * num_draws, [top_p] * num_draws, [min_p] * num_draws
    return set(sampling.draw(rows, grid, *lists, Workspace()).tolist())


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_argmax_is_the_largest(vocab_size: int) -> None:
    logits = random_logits(20, vocab_size)
    assert sampling.argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("vocab_size", [300, 512, 1024])
def test_argmax_takes_the_lowest_id_among_equals(vocab_size: int) -> None:
    for lowest in (0, 3, 255, 256, 299):
        logits = torch.zeros(1, vocab_size)
        if lowest < vocab_size - 1:
            logits[0, [lowest, vocab_size - 1, max(lowest, vocab_size // 2)]] = 2.0
            assert sampling.argmax(logits).item() == lowest
    assert sampling.argmax(torch.full((1, vocab_size), -1.0)).item() == 0


# ---------------------------------------------------------------- draw


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draw_is_the_rule(vocab_size: int) -> None:
    chooser = random.Random(vocab_size)
    for trial in range(25):
        logits = random_logits(1, vocab_size, seed=trial)[0]
        if trial % 3 == 0:
            logits = logits.round()  # many equals
        u = chooser.choice([0.0, chooser.random(), chooser.random(), 1 - 2.0**-53])
        temperature = chooser.choice([0.01, 0.3, 1.0, 2.0])
        top_k = chooser.choice([0, 1, 5, 100, vocab_size, vocab_size + 9])
        top_p = chooser.choice([1.0, 0.99, 0.5, 0.05])
        min_p = chooser.choice([0.0, 0.1, 1.0])
        expected = restated_draw(logits.tolist(), u, temperature, top_k, top_p, min_p)
        assert draw_one(logits, u, temperature, top_k, top_p, min_p) == expected


def test_numbers_at_the_edges_draw_the_first_and_last_kept_id() -> None:
    logits = torch.full((600,), -math.inf)
    logits[[3, 255, 256, 599]] = 1.0
    assert draw_one(logits, 0.0) == 3
    assert draw_one(logits, 0.25 - 2**-40) == 3
    assert draw_one(logits, 0.25) == 255
    assert draw_one(logits, 0.5) == 256
    assert draw_one(logits, 1 - 2.0**-53) == 599


def test_an_impossible_id_is_never_drawn() -> None:
    logits = random_logits(1, 700)[0]
    logits[::2] = -math.inf
    assert all(token_id % 2 for token_id in kept_ids(logits, temperature=2.0))


def test_top_k_keeps_all_that_equal_the_kth() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 2.0])
    assert kept_ids(logits, top_k=1) == {1}
    assert kept_ids(logits, top_k=2) == {1, 2, 3, 5}
    assert kept_ids(logits, top_k=5) == {0, 1, 2, 3, 5}
    assert kept_ids(logits, top_k=6) == set(range(6))


@pytest.mark.parametrize("k", [1, 2, 3, 17, 256, 257, 900])
def test_kth_largest(k: int) -> None:
    for seed in range(5):
        row = random_logits(1, 1000, seed)[0].round(decimals=seed % 3)
        assert sampling.kth_largest(row, k) == row.sort(descending=True).values[k - 1]


def test_top_p_keeps_the_fewest_that_reach_it_and_their_equals() -> None:
    logits = torch.tensor([0.5, 0.2, 0.15, 0.15]).log()
    assert kept_ids(logits, top_p=0.3) == {0}
    assert kept_ids(logits, top_p=0.6) == {0, 1}
    assert kept_ids(logits, top_p=0.75) == {0, 1, 2, 3}
    assert kept_ids(logits, top_p=1e-9) == {0}
    assert kept_ids(torch.zeros(5), top_p=0.2) == set(range(5))


def test_min_p_is_relative_to_the_most_probable() -> None:
    logits = torch.tensor([0.4, 0.3, 0.1, 0.2]).log()
    assert kept_ids(logits, min_p=0.2) == {0, 1, 2, 3}
    assert kept_ids(logits, min_p=0.3) == {0, 1, 3}
    assert kept_ids(logits, min_p=1.0) == {0}


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept_ids(logits, top_p=0.5) == {0, 1}
    assert kept_ids(logits, top_k=2, top_p=0.5) == {0}
    assert kept_ids(logits, min_p=0.6, top_p=0.5) == {0}


def test_temperature_flattens_and_sharpens() -> None:
    logits = torch.tensor([2.0, 1.0])
    for temperature in (0.25, 1.0, 2.0):
        share = 1 / (1 + math.exp(-1 / temperature))
        assert draw_one(logits, share - 1e-9, temperature) == 0
        assert draw_one(logits, share + 1e-9, temperature) == 1


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    logits = random_logits(13, 1000)
    logits[5] *= 30
    temperatures = [0.7 + 0.1 * i for i in range(13)]
    together = sampling.to_weights(logits, temperatures, Workspace()).clone()
    for index in range(13):
        alone = sampling.to_weights(logits[index : index + 1], [temperatures[index]], Workspace())
        assert torch.equal(alone[0], together[index])


def test_cumulative_weights_never_decrease_and_end_at_the_total() -> None:
    weights = sampling.to_weights(random_logits(4, 5000, scale=8.0), [1.0] * 4, Workspace())
    inside, over_blocks = sampling.fold(weights)
    before = torch.nn.functional.pad(over_blocks, (1, 0))[:, :-1]
    sums = (before.unsqueeze(-1) + inside).flatten(1)
    assert bool((sums.diff(dim=1) >= 0).all())
    assert torch.equal(sums[:, -1], over_blocks[:, -1])


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        draw_one(torch.tensor([1.0, math.nan]), 0.5)


@pytest.mark.parametrize(
    ("settings", "degrees"),
    [
        ({}, 29),
        ({"temperature": 0.6}, 29),
        ({"top_k": 8}, 7),
        ({"top_p": 0.8}, None),
        ({"min_p": 0.05}, None),
    ],
)
def test_frequencies_match_probabilities(settings: dict[str, float], degrees: int | None) -> None:
    """Chi-square of 20,000 draws with counter-based numbers against the exact distribution, fixed seeds."""
    num_draws = 20_000
    logits = random_logits(1, 30, seed=11, scale=1.0)
    temperature = settings.get("temperature", 1.0)
    probabilities = (logits[0].double() / temperature).softmax(-1)
    keep = expected_keep(probabilities, logits[0], settings)
    probabilities = torch.where(keep, probabilities, 0.0)
    probabilities /= probabilities.sum()
    numbers = uniforms([1234] * num_draws, range(num_draws), [0] * num_draws)
    lists = (
        [temperature] * num_draws,
        [int(settings.get("top_k", 0))] * num_draws,
        [settings.get("top_p", 1.0)] * num_draws,
        [settings.get("min_p", 0.0)] * num_draws,
    )
    drawn = sampling.draw(logits.expand(num_draws, -1), numbers, *lists, Workspace())
    counts = torch.bincount(drawn, minlength=30).double()
    assert bool((counts[~keep] == 0).all())
    expected = probabilities[keep] * num_draws
    chi_square = float(((counts[keep] - expected) ** 2 / expected).sum())
    num_degrees = int(keep.sum()) - 1
    assert degrees is None or num_degrees == degrees
    # Wilson and Hilferty's approximation of the 0.9999 quantile.
    spread = 2 / (9 * num_degrees)
    assert chi_square < num_degrees * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


def expected_keep(probabilities: Tensor, logits: Tensor, settings: dict[str, float]) -> Tensor:
    keep = probabilities >= settings.get("min_p", 0.0) * probabilities.max()
    if top_k := int(settings.get("top_k", 0)):
        keep &= logits >= logits.sort(descending=True).values[top_k - 1]
    if top_p := settings.get("top_p"):
        ordered = probabilities.sort(descending=True).values
        keep &= probabilities >= ordered[int((ordered.cumsum(0) < top_p).sum())]
    return keep


# ---------------------------------------------------------------- adjustments


def test_adjustments_of_a_row() -> None:
    row = torch.tensor([1.0, -2.0, 3.0, 0.0])
    sampling.penalise_repetition(row, torch.tensor([0, 1, 1]), 2.0)
    assert row.tolist() == [0.5, -4.0, 3.0, 0.0]
    sampling.penalise_frequency(row, torch.tensor([2, 2, 3]), 0.5, 0.25)
    assert row.tolist() == [0.5, -4.0, 1.75, -0.75]
    sampling.add_bias(row, torch.tensor([1, 1, 3]), torch.tensor([1.0, 2.0, 5.0]))
    assert row.tolist() == [0.5, -1.0, 1.75, 4.25]
    sampling.ban(row, torch.tensor([3]))
    assert row.tolist() == [0.5, -1.0, 1.75, -math.inf]
    sampling.allow_only(row, torch.tensor([1, 3]))
    assert row.tolist() == [-math.inf, -1.0, -math.inf, -math.inf]


def test_a_ban_on_everything_bans_nothing() -> None:
    row = torch.tensor([1.0, 2.0, -math.inf])
    sampling.ban(row, torch.tensor([0, 1]))
    assert row.tolist() == [1.0, 2.0, -math.inf]


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("vocab_size", [4, 300, 1024])
def test_logprobs_are_log_softmax(vocab_size: int) -> None:
    logits = random_logits(3, vocab_size, seed=4)
    normalisers = sampling.log_normalisers(logits, Workspace())
    for row, normaliser in zip(logits, normalisers.tolist(), strict=True):
        expected = row.double().log_softmax(-1)
        order = row.sort(descending=True, stable=True).indices.tolist()
        for place in (0, 1, vocab_size - 1):
            logprob, rank, top_token_ids, top_logprobs = sampling.row_logprobs(
                row, normaliser, order[place], 3
            )
            assert logprob == pytest.approx(float(expected[order[place]]), abs=1e-12)
            assert rank == place + 1
            assert top_token_ids == order[:3]
            assert top_logprobs == pytest.approx(expected[order[:3]].tolist(), abs=1e-12)


def test_logprobs_of_some_rows_are_those_of_each() -> None:
    logits = random_logits(9, 300, seed=4)
    rows = [8, 0, 0, *range(9)]
    answers = sampling.token_logprobs(logits, rows, [7] * 12, [1, 0, 4] * 4, Workspace())
    normalisers = sampling.log_normalisers(logits, Workspace()).tolist()
    assert answers == [
        sampling.row_logprobs(logits[row], normalisers[row], 7, num_top)
        for row, num_top in zip(rows, [1, 0, 4] * 4, strict=True)
    ]
    assert sampling.token_logprobs(logits, [], [], [], Workspace()) == []


def test_equal_logits_share_a_rank_and_are_listed_by_id() -> None:
    row = torch.tensor([2.0, 5.0, 2.0, 5.0, 2.0])
    assert sampling.row_logprobs(row, 0.0, 4, 4)[1:3] == (3, [1, 3, 0, 2])
    assert sampling.row_logprobs(row, 0.0, 3, 0) == (5.0, 1, [], [])
    assert sampling.row_logprobs(row, 0.0, 3, 20)[2] == [1, 3, 0, 2, 4]
