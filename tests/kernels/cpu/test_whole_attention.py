"""Attention in whole numbers where its sums are largest, and where one weight is large beside many small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import reference
from tests.kernels.cpu.test_attention import pool_and_result
from tests.support.host_kernels import assert_same_bits, backends
from tests.support.paged_steps import Case, Step

POSITIONS = 64  # a tile
HEAD_DIMS = (16, 24, 32, 48, 64, 80, 128, 192, 256)


def results(case: Case, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of queries of ones over vectors of one number each, `keys` and `values` by position: the same bits on every
    variant, and what they should be.
    """
    bits: Tensor | None = None
    for backend in reversed(backends()):
        _, _, step = pool_and_result(case, backend)
        fill(step, keys, values)
        query = torch.ones_like(step.query)
        arguments = query, step.layer, step.metadata, scale
        actual = backend.paged_attention(*arguments)
        bits = actual if bits is None else bits
        assert_same_bits(actual, bits, backend.description)
        expected = reference.paged_attention(*arguments)
    assert bits is not None
    return bits, expected


def fill(step: Step, keys: Tensor, values: Tensor) -> None:
    blocks = step.metadata.block_tables[0].tolist()
    size = step.layer.block_size
    for position, (key, value) in enumerate(zip(keys.tolist(), values.tolist(), strict=True)):
        slot = step.layer.values[blocks[position // size], :, :, position % size]
        slot[:, 0], slot[:, 1] = key, value


def case_of(head_dim: int, rows: int, kv_dtype: str) -> Case:
    return Case(((POSITIONS - rows, rows),), 1, 3, head_dim, kv_dtype=kv_dtype)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_largest_sums_fit(head_dim: int, kv_dtype: str, rows: int) -> None:
    """A sum beyond 32 bits would change its sign: that of the result here."""
    case = case_of(head_dim, rows, kv_dtype)
    ones, signs = torch.ones(POSITIONS), torch.ones(POSITIONS)
    signs[1::2] = -1
    for sign in (1, -1):
        # Scores of opposite signs: the one position of two that is seen.
        actual, expected = results(case, sign * signs, signs, scale=1.0)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
        assert (actual * sign > 0.99).all()
        # Equal weights of values of one sign.
        actual, _ = results(case, ones, sign * ones, scale=1.0 / head_dim)
        assert (actual - sign).abs().max() < 1e-6


@pytest.mark.parametrize("rows", [1, 20])
def test_many_small_weights_beside_a_large_one_are_not_lost(rows: int) -> None:
    """Each is less than half of a step of equal weights; together they are a two-hundredth of the sum."""
    case = case_of(64, rows, "float16")
    keys = torch.full((POSITIONS,), 0.62)
    keys[10] = 10.0
    actual, expected = results(case, keys, torch.ones(POSITIONS), scale=1 / 64)
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)
    without, _ = results(replace(case, seed=1), keys, (keys > 1).float(), scale=1 / 64)
    assert (actual - without).min() > 0.004
