"""Partials merged on the host: the reference's numbers, equal bits on every variant."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import reference
from tests.support.host_kernels import assert_same_bits, backends, examples, on_every_variant
from tests.support.poison import poisoned_memory

TOLERANCE = 2e-6
"""Absolute and relative, for values of the size of 1."""


@examples(80)
@given(
    num_partials=st.integers(1, 6),
    rows=st.integers(1, 40),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 4, 16, 40, 64]),
    size=st.sampled_from([1.0, 10.0, 300.0]),
    offset=st.sampled_from([0.0, -5000.0, 5000.0]),
    seed=st.integers(0, 999),
)
def test_merged_partials_are_the_references(
    num_partials: int, rows: int, heads: int, head_dim: int, size: float, offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(num_partials, rows, heads, head_dim, generator=generator)
    log_sums = torch.randn(num_partials, rows, heads, generator=generator) * size + offset
    unseen = torch.rand(log_sums.shape, generator=generator) < 0.3
    log_sums[unseen] = -math.inf
    outputs[unseen] = math.nan
    with poisoned_memory():
        ours = on_every_variant(lambda backend: backend.merge_partials(outputs, log_sums))
    expected = reference.merge_partials(outputs, log_sums)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert not bool(ours[unseen.all(dim=0)].any())


def test_one_partial_is_itself_and_ranges_that_saw_nothing_change_no_bit() -> None:
    output, log_sum = torch.randn(1, 2, 3, 20), torch.randn(1, 2, 3) * 1000
    own = on_every_variant(lambda backend: backend.merge_partials(output, log_sum))
    assert torch.equal(own, output[0])
    broken, nothing = torch.full_like(output, math.nan), torch.full_like(log_sum, -math.inf)
    for order in ((0, 1), (1, 0)):
        outputs = torch.cat([(output, broken)[i] for i in order])
        log_sums = torch.cat([(log_sum, nothing)[i] for i in order])
        both = on_every_variant(lambda b, o=outputs, s=log_sums: b.merge_partials(o, s))  # type: ignore[misc]
        assert torch.equal(both, output[0])


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_log_sum_that_is_no_number_leaves_none(damaged: int) -> None:
    """Wherever it stands, and only in its own row."""
    outputs, log_sums = torch.randn(3, 2, 1, 20), torch.randn(3, 2, 1)
    healthy = on_every_variant(lambda backend: backend.merge_partials(outputs, log_sums))
    log_sums[damaged, 1] = math.nan
    for backend in backends():
        ours = backend.merge_partials(outputs, log_sums)
        assert_same_bits(ours[0], healthy[0], backend.description)
        assert bool(ours[1].isnan().all()), backend.description
    assert bool(reference.merge_partials(outputs, log_sums)[1].isnan().all())


def test_the_fold_is_left_in_the_order_given() -> None:
    """In float32, 1e8 - 1e8 + 1 is 1 from the left; from the right it would be 0."""
    outputs = torch.tensor([1e8, -1e8, 1.0]).view(3, 1, 1, 1)
    merged = on_every_variant(lambda backend: backend.merge_partials(outputs, torch.zeros(3, 1, 1)))
    torch.testing.assert_close(merged.item(), 1 / 3)


def test_partials_may_be_views() -> None:
    outputs, log_sums = torch.randn(2, 3, 5, 32)[..., :24], torch.randn(5, 2, 3).permute(1, 2, 0)
    ours = on_every_variant(lambda backend: backend.merge_partials(outputs, log_sums))
    expected = reference.merge_partials(outputs, log_sums)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)
