"""Sampling on the card's terms: the reference's ids, ranks and numbers, ties and all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference, triton
from kernels.reference import sampling
from kernels.triton import drawing, logprobs
from kernels.workspace import Workspace
from tests.support.triton_device import IS_INTERPRETED, on_device

VOCAB_SIZES = [1, 5, 256, 600]
few = settings(max_examples=6 if IS_INTERPRETED else 300)


@pytest.fixture(autouse=True)
def _poison() -> None:
    """Without poisoned memory: what torch sorts and sums on a card has no deterministic form."""


def logits_of(num_rows: int, vocab_size: int, seed: int = 0, has_ties: bool = False) -> Tensor:
    logits = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    return logits.round() if has_ties else logits


@pytest.mark.parametrize("vocab_size", [*VOCAB_SIZES, 5000])
def test_argmax_takes_the_lowest_of_equals(vocab_size: int) -> None:
    for has_ties in (False, True):
        logits = logits_of(3, vocab_size, has_ties=has_ties)
        assert triton.argmax(on_device(logits)).tolist() == reference.argmax(logits).tolist()


def test_argmax_among_banned_ids() -> None:
    logits = torch.full((2, 300), float("-inf"))
    logits[0, 299] = -5.0
    assert triton.argmax(on_device(logits)).tolist() == [299, 0]


def test_uniforms_are_the_references_bits() -> None:
    seeds = [0, 5, 2**64 - 1, 2**63, 123_456_789_012_345] * 40
    positions = [0, 1, 2, 3, 2**32 - 1] * 40
    choices = [*range(199), 2**32 - 1]
    for purpose in (0, 7):
        ours = triton.uniforms(seeds, positions, choices, purpose)
        assert torch.equal(ours.cpu(), reference.uniforms(seeds, positions, choices, purpose))


@few
@given(
    vocab_size=st.sampled_from(VOCAB_SIZES),
    settings_=st.lists(
        st.tuples(
            st.sampled_from([0.3, 1.0, 2.5]),
            st.sampled_from([0, 1, 3, 40, 10**6]),
            st.sampled_from([1.0, 0.9, 0.5, 0.01]),
            st.sampled_from([0.0, 0.05, 0.5]),
        ),
        min_size=1,
        max_size=4,
    ),
    has_ties=st.booleans(),
    seed=st.integers(0, 999),
)
def test_draws_are_the_references(
    vocab_size: int, settings_: list[tuple[float, int, float, float]], has_ties: bool, seed: int
) -> None:
    num_rows = len(settings_)
    logits = logits_of(num_rows, vocab_size, seed, has_ties)
    lists = tuple(list(values) for values in zip(*settings_, strict=True))
    generator = torch.Generator().manual_seed(seed)
    for numbers in (
        torch.rand(num_rows, dtype=torch.float64, generator=generator),
        torch.zeros(num_rows, dtype=torch.float64),
        torch.full((num_rows,), 1 - 2.0**-53, dtype=torch.float64),
    ):
        ours = triton.draw(on_device(logits), on_device(numbers), *lists, Workspace())
        theirs = reference.draw(logits, numbers, *lists, Workspace())
        assert ours.tolist() == theirs.tolist()


def test_a_number_on_a_boundary_takes_the_next_id() -> None:
    """Equal weights: cumulative sums and thresholds are exact, on every machine."""
    logits = torch.zeros(4, 512)
    numbers = torch.tensor([0.0, 1 / 512, 0.5, 511 / 512], dtype=torch.float64)
    lists = ([1.0] * 4, [0] * 4, [1.0] * 4, [0.0] * 4)
    ours = triton.draw(on_device(logits), on_device(numbers), *lists, Workspace())
    assert ours.tolist() == [0, 1, 256, 511]


def test_logits_that_are_no_numbers_are_refused() -> None:
    logits = torch.tensor([[1.0, float("nan")]])
    numbers = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not finite"):
        triton.draw(on_device(logits), on_device(numbers), [1.0], [0], [1.0], [0.0], Workspace())
    with pytest.raises(AssertionError, match="not finite"):
        triton.token_logprobs(on_device(logits), [0], [0], [1], Workspace())


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_log_normalisers(vocab_size: int) -> None:
    logits = logits_of(2, vocab_size)
    ours = drawing.log_normalisers(on_device(logits), Workspace()).cpu()
    theirs = sampling.log_normalisers(logits, Workspace())
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("vocab_size", [1, 5, 257, 9000])
@pytest.mark.parametrize("has_ties", [False, True])
def test_logprobs_of_a_row(vocab_size: int, has_ties: bool) -> None:
    (row,) = logits_of(1, vocab_size, seed=3, has_ties=has_ties)
    for token_id, num_top in ((0, 0), (vocab_size - 1, 1), (vocab_size // 2, 20)):
        ours = logprobs.row_logprobs(on_device(row), 0.25, token_id, num_top)
        assert ours == sampling.row_logprobs(row, 0.25, token_id, num_top)


def test_logprobs_of_some_rows() -> None:
    logits, asked = logits_of(4, 600), ([3, 0, 3], [5, 599, 0], [2, 0, 20])
    ours = triton.token_logprobs(on_device(logits), *asked, Workspace())
    theirs = reference.token_logprobs(logits, *asked, Workspace())
    for own, expected in zip(ours, theirs, strict=True):
        assert own[1:3] == expected[1:3]
        assert [own[0], *own[3]] == pytest.approx([expected[0], *expected[3]], abs=1e-12)
    assert triton.token_logprobs(on_device(logits), [], [], [], Workspace()) == []


def test_adjustments_of_a_row() -> None:
    ours, theirs = (logits_of(1, 40)[0] for _ in range(2))
    ours = on_device(ours)
    ids, bias = torch.tensor([3, 7, 7, 30]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    for name, arguments in (
        ("penalise_repetition", (ids, 1.5)),
        ("penalise_frequency", (ids, 0.5, 0.25)),
        ("add_bias", (ids, bias)),
        ("ban", (ids[:1],)),
        ("allow_only", (ids[1:],)),
    ):
        getattr(triton, name)(ours, *arguments)
        getattr(reference, name)(theirs, *arguments)
        assert torch.equal(ours.cpu(), theirs), name
