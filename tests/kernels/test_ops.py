"""The row-wise operations and products against their formulas in float64, on random shapes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops
from kernels.gguf_formats import FORMAT_BY_NAME
from kernels.weights import DenseWeight, PackedWeight
from tests.support.poison import poisoned_memory
from tests.support.random_weights import random_blocks

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Relative, and absolute as a share of the largest number: about three roundings to the dtype."""

dtypes = st.sampled_from(sorted(TOLERANCE, key=str))
num_rows = st.integers(1, 9)
widths = st.sampled_from([1, 2, 3, 8, 31, 64, 160])
seeds = st.integers(0, 2**31)


def random_rows(*shape: int, dtype: torch.dtype, seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * size).to(dtype)


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, size: Tensor | None = None
) -> None:
    """size: numbers whose largest stands for the size of the result; the expected ones unless told otherwise."""
    assert actual.dtype == dtype
    tolerance = TOLERANCE[dtype]
    slack = tolerance * max(float((expected if size is None else size).abs().max()), 1e-30)
    torch.testing.assert_close(actual.double(), expected, atol=slack, rtol=tolerance)


def strided(rows: Tensor) -> Tensor:
    """The same numbers, every row with others behind it: as a part of a larger product is."""
    return torch.cat((rows, torch.full_like(rows, math.nan)), dim=-1)[..., : rows.shape[-1]]


# ---------------------------------------------------------------- norms


def expected_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = hidden.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@given(rows=num_rows, width=widths, dtype=dtypes, seed=seeds, size=st.sampled_from([1e-4, 1, 100]))
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, seed: int, size: float) -> None:
    hidden = random_rows(rows, width, dtype=dtype, seed=seed, size=size)
    weight = random_rows(width, dtype=dtype, seed=seed + 1)
    with poisoned_memory():
        actual = ops.rms_norm(strided(hidden), weight, 1e-5)
    assert_close(actual, expected_norm(hidden, weight, 1e-5), dtype)


@given(rows=num_rows, heads=st.integers(1, 4), dtype=dtypes, seed=seeds)
def test_rms_norm_of_heads(rows: int, heads: int, dtype: torch.dtype, seed: int) -> None:
    """A norm a head: the last of three dimensions, strided in a fused product."""
    fused = random_rows(rows, heads + 3, 16, dtype=dtype, seed=seed)
    weight = random_rows(16, dtype=dtype, seed=seed + 1)
    with poisoned_memory():
        actual = ops.rms_norm(fused[:, 1 : heads + 1], weight, 1e-6)
    assert_close(actual, expected_norm(fused[:, 1 : heads + 1], weight, 1e-6), dtype)


def test_rms_norm_of_half_precision_takes_the_mean_in_float32() -> None:
    hidden = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square exceeds float16
    assert ops.rms_norm(hidden, torch.ones(4, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 4]


@given(rows=num_rows, width=widths, dtype=dtypes, seed=seeds)
def test_add_rms_norm_returns_norm_and_sum(
    rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    hidden = random_rows(rows, width, dtype=dtype, seed=seed)
    residual = random_rows(rows, width, dtype=dtype, seed=seed + 1)
    weight = random_rows(width, dtype=dtype, seed=seed + 2)
    total = hidden + residual
    with poisoned_memory():
        normed, summed = ops.add_rms_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    assert_close(normed, expected_norm(total, weight, 1e-5), dtype)


# ---------------------------------------------------------------- activations


def silu(gate: float) -> float:
    return gate / (1 + math.exp(-gate))


def gelu_tanh(gate: float) -> float:
    return gate / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))


@pytest.mark.parametrize(
    ("operation", "activation"), [(ops.silu_mul, silu), (ops.gelu_mul, gelu_tanh)]
)
@given(rows=num_rows, width=widths, dtype=dtypes, seed=seeds, size=st.sampled_from([1, 12]))
def test_activation_of_the_first_half_times_the_second(
    operation: Callable[[Tensor], Tensor],
    activation: Callable[[float], float],
    rows: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    size: float,
) -> None:
    gate_up = random_rows(rows, 2 * width, dtype=dtype, seed=seed, size=size)
    gate, up = gate_up.double().numpy()[:, :width], gate_up.double().numpy()[:, width:]
    with poisoned_memory():
        actual = operation(gate_up)
    expected = np.vectorize(activation, otypes=[float])(gate) * up
    # A gate far below zero leaves what is lost in 1 - 1: nothing beside the gate itself.
    assert_close(actual, torch.from_numpy(expected), dtype, size=torch.from_numpy(gate * up))


def test_gelu_is_the_approximation_and_not_the_exact_one() -> None:
    actual = ops.gelu_mul(torch.ones(1, 2)).item()
    assert actual == pytest.approx(gelu_tanh(1.0), abs=1e-6)
    assert abs(actual - 0.8413447460685429) > 1e-4  # the normal distribution's share below 1


# ---------------------------------------------------------------- rotation


@given(
    rows=num_rows,
    heads=st.integers(1, 5),
    half=st.sampled_from([1, 3, 8, 32]),
    dtype=dtypes,
    seed=seeds,
)
def test_rope_rotates_element_i_with_element_i_plus_half(
    rows: int, heads: int, half: int, dtype: torch.dtype, seed: int
) -> None:
    fused = random_rows(rows, heads + 1, 2 * half, dtype=dtype, seed=seed)
    angles = random_rows(rows, half, dtype=torch.float32, seed=seed + 1, size=3.0)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    before = fused.clone()
    with poisoned_memory():
        rotated = ops.rope(fused[:, :heads], cos, sin)
    assert torch.equal(fused, before), "the input stays as it was"
    first, second = before[:, :heads].double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[:, None]
    assert_close(rotated, torch.cat((turned.real, turned.imag), dim=-1), dtype)


# ---------------------------------------------------------------- products with packed weights


@pytest.mark.parametrize("num_inputs", [1, 2, 7, 8, 9, 33, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_over_packed_weights(num_inputs: int, has_bias: bool) -> None:
    inputs = random_rows(num_inputs, 24, dtype=torch.float32, seed=1)
    values = random_rows(200, 24, dtype=torch.float32, seed=2)
    bias = random_rows(200, dtype=torch.float32, seed=3) if has_bias else None
    packed = ops.pack(DenseWeight(values))
    assert packed.shape == (200, 24)
    torch.testing.assert_close(ops.linear(inputs, packed, bias), F.linear(inputs, values, bias))


def test_only_wide_float32_matrices_are_packed() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN to pack for")
    assert isinstance(ops.pack(DenseWeight(torch.randn(200, 24))), PackedWeight)
    for weight in (
        DenseWeight(torch.randn(24, 24)),
        DenseWeight(torch.randn(200, 24).bfloat16()),
        random_blocks(FORMAT_BY_NAME["Q8_0"], 200, 1),
    ):
        assert ops.pack(weight) is weight


def test_a_weight_whose_rows_cannot_be_read_is_no_embedding() -> None:
    packed = PackedWeight(torch.empty(0), (200, 24))
    with pytest.raises(AssertionError, match="one matrix whose rows can be read"):
        ops.embedding(torch.tensor([0]), packed)
