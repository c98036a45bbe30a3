"""Attention over ranges of positions, merged, against attention over all of them."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops
from tests.support.poison import poisoned_memory

TOLERANCE = 2e-6
"""Absolute and relative, for values of the size of 1."""


def attention(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output `[T, Hq, D]` and log-sum `[T, Hq]` of scores `[T, Hq, L]` and values `[L, Hq, D]`, float64.

    Where every score is -inf the output is NaN, as a kernel that wrote nothing would leave it.
    """
    log_sums = scores.logsumexp(-1)
    return torch.einsum("thl,lhd->thd", (scores - log_sums[..., None]).exp(), values), log_sums


@st.composite
def splits(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    """Scores, values, and where the positions are cut; some rows do not see some positions."""
    length, rows, heads = draw(st.integers(1, 60)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([1.0, 10.0, 300.0]))
    offset = draw(st.sampled_from([0.0, -5000.0, 5000.0]))
    double = torch.float64
    scores = torch.randn(rows, heads, length, generator=generator, dtype=double) * size + offset
    lengths = torch.randint(0, length + 1, (rows,), generator=generator)
    unseen = torch.arange(length) >= lengths[:, None, None]
    scores.masked_fill_(unseen, -math.inf)
    head_dim = draw(st.sampled_from([1, 4, 16]))
    values = torch.randn(length, heads, head_dim, generator=generator, dtype=double)
    cuts = draw(st.lists(st.integers(0, length), max_size=5))
    return scores, values, sorted({0, length, *cuts})


@given(split=splits())
def test_merged_partials_equal_the_whole(split: tuple[Tensor, Tensor, list[int]]) -> None:
    scores, values, cuts = split
    parts = [
        attention(scores[..., first:last], values[first:last]) for first, last in pairwise(cuts)
    ]
    outputs = torch.stack([output for output, _ in parts]).float()
    log_sums = torch.stack([log_sum for _, log_sum in parts]).float()
    with poisoned_memory():
        merged = ops.merge_partials(outputs, log_sums)
    # Log-sums are rounded to float32 before they are merged, so the whole is built from the rounded ones.
    weights = (log_sums.double() - log_sums.double().logsumexp(0)).exp().nan_to_num(0.0)
    expected = (weights[..., None] * outputs.double().nan_to_num(0.0)).sum(0)
    torch.testing.assert_close(merged.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
    whole, log_sum = attention(scores, values)
    sees = log_sum > -math.inf
    loose = TOLERANCE + float(log_sum[sees].abs().max() if bool(sees.any()) else 0) * 2.0**-22
    torch.testing.assert_close(merged[sees].double(), whole[sees], atol=loose, rtol=loose)
    assert not bool(merged[~sees].any())


@given(split=splits(), place=st.integers(0, 3))
def test_a_partial_that_saw_nothing_changes_no_bit(
    split: tuple[Tensor, Tensor, list[int]], place: int
) -> None:
    scores, values, _ = split
    halves = [attention(scores[..., i::3], values[i::3]) for i in range(3)]
    outputs = [output.float() for output, _ in halves]
    log_sums = [log_sum.float() for _, log_sum in halves]
    before = ops.merge_partials(torch.stack(outputs), torch.stack(log_sums))
    outputs.insert(place, torch.full_like(outputs[0], math.nan))
    log_sums.insert(place, torch.full_like(log_sums[0], -math.inf))
    after = ops.merge_partials(torch.stack(outputs), torch.stack(log_sums))
    assert torch.equal(after, before)


def test_one_partial_is_itself() -> None:
    output, log_sum = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3) * 1000
    assert torch.equal(ops.merge_partials(output, log_sum), output[0])


def test_the_fold_is_left_in_the_order_given() -> None:
    """In float32, 1e8 - 1e8 + 1 is 1 from the left; from the right it would be 0."""
    outputs = torch.tensor([1e8, -1e8, 1.0]).view(3, 1, 1, 1)
    merged = ops.merge_partials(outputs, torch.zeros(3, 1, 1))
    torch.testing.assert_close(merged.item(), 1 / 3)
