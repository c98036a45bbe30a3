"""Quantised weights: what they expand to, products and rows of them, stacks. Every format against float64."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops
from kernels.gguf_formats import FORMAT_BY_NAME
from kernels.reference.quants import dequantize
from kernels.weights import (
    BlockWeight,
    ChannelWeight,
    DenseWeight,
    GroupWeight,
    RowWeight,
    StackedWeight,
    stack_rows,
)
from tests.support.poison import poisoned_memory
from tests.support.random_weights import QUANTIZED_FORMATS, random_blocks

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Of a product: the error over sum(|input| * |weight|), by the type that weights expand to and inputs have."""


def channel_weight(num_rows: int, num_columns: int, seed: int = 0) -> ChannelWeight:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_columns)
    values = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    return ChannelWeight(values, torch.rand(num_rows, generator=generator) / 64)


def group_weight(
    num_rows: int, num_columns: int, group_size: int, has_zeros: bool, seed: int = 0
) -> GroupWeight:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_columns // 2)
    packed = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    groups = (num_rows, num_columns // group_size)
    scales = torch.rand(groups, generator=generator) / 4
    zeros = torch.rand(groups, generator=generator) * 15 if has_zeros else None
    return GroupWeight(packed, scales, zeros, group_size)


def expected_values(weight: RowWeight) -> np.ndarray:
    """The elements in float64, one at a time from the definition."""
    if isinstance(weight, BlockWeight):
        kind = gguf.GGMLQuantizationType(weight.block_format.type_id)
        return gguf.dequantize(weight.raw.numpy(), kind).astype(np.float64)
    if isinstance(weight, DenseWeight):
        return weight.values.double().numpy()
    scales = weight.scales.tolist()
    if isinstance(weight, ChannelWeight):
        rows = zip(weight.values.tolist(), scales, strict=True)
        return np.array([[value * scale for value in row] for row, scale in rows])
    zeros = None if weight.zeros is None else weight.zeros.tolist()
    values = np.empty(weight.shape)
    for row, packed in enumerate(weight.packed.tolist()):
        for column in range(weight.shape[1]):
            quant = packed[column // 2] >> 4 if column % 2 else packed[column // 2] & 15
            group = column // weight.group_size
            zero = 8 if zeros is None else zeros[row][group]
            values[row, column] = (quant - zero) * scales[row][group]
    return values


@st.composite
def weights(draw: st.DrawFn) -> RowWeight:
    """A weight of any format."""
    num_rows, seed = draw(st.integers(1, 12)), draw(st.integers(0, 2**31))
    kind = draw(st.sampled_from(["dense", "channel", "group", *QUANTIZED_FORMATS]))
    if kind == "dense":
        generator = torch.Generator().manual_seed(seed)
        return DenseWeight(torch.randn(num_rows, draw(st.integers(1, 70)), generator=generator))
    if kind == "channel":
        return channel_weight(num_rows, draw(st.integers(1, 70)), seed)
    if kind == "group":
        group_size = draw(st.sampled_from([2, 16, 32, 128]))
        num_columns = group_size * draw(st.integers(1, 3))
        return group_weight(num_rows, num_columns, group_size, draw(st.booleans()), seed)
    block_format = FORMAT_BY_NAME[kind]
    return random_blocks(block_format, num_rows, draw(st.integers(1, 3)), seed)


@given(weight=weights())
def test_elements_are_those_of_the_definition(weight: RowWeight) -> None:
    with poisoned_memory():
        actual = dequantize(weight)
    assert actual.shape == weight.shape
    torch.testing.assert_close(
        actual.double(), torch.from_numpy(expected_values(weight)), atol=1e-6, rtol=1e-6
    )


@given(weight=weights(), num_inputs=st.integers(0, 9), has_bias=st.booleans())
def test_products_of_every_format(weight: RowWeight, num_inputs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_inputs)
    inputs = torch.randn(num_inputs, weight.shape[1], generator=generator)
    bias = torch.randn(weight.shape[0], generator=generator) if has_bias else None
    with poisoned_memory():
        actual = ops.linear(inputs, weight, bias)
    check_product(actual, inputs, expected_values(weight), bias)


def check_product(actual: Tensor, inputs: Tensor, values: np.ndarray, bias: Tensor | None) -> None:
    """Within the tolerance of its dtype, for each output on its own."""
    wide = inputs.double().numpy()
    expected, size = wide @ values.T, np.abs(wide) @ np.abs(values.T)
    if bias is not None:
        expected, size = expected + bias.double().numpy(), size + np.abs(bias.double().numpy())
    error = np.abs(actual.double().numpy() - expected)
    assert actual.shape == expected.shape
    assert bool((error <= TOLERANCE[actual.dtype] * size + 1e-30).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_inputs", [1, 5])
def test_products_in_half_precision(dtype: torch.dtype, num_inputs: int) -> None:
    channels, groups = channel_weight(24, 128), group_weight(24, 128, 32, has_zeros=True)
    for weight in (
        ChannelWeight(channels.values, channels.scales, dtype),
        GroupWeight(groups.packed, groups.scales, groups.zeros, 32, dtype),
        DenseWeight(torch.randn(24, 128).to(dtype)),
        BlockWeight(
            random_blocks(FORMAT_BY_NAME["Q4_K"], 24, 1).raw, FORMAT_BY_NAME["Q4_K"], dtype
        ),
    ):
        inputs = torch.randn(num_inputs, weight.shape[1]).to(dtype)
        actual = ops.linear(inputs, weight)
        assert actual.dtype == dtype
        check_product(actual, inputs, expected_values(weight), None)


@given(weight=weights(), seed=st.integers(0, 2**31))
def test_an_embedding_is_rows_of_the_elements(weight: RowWeight, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, weight.shape[0], (seed % 7,), generator=generator)
    with poisoned_memory():
        actual = ops.embedding(token_ids, weight)
    assert torch.equal(actual, dequantize(weight)[token_ids])


@pytest.mark.parametrize("has_zeros", [False, True])
def test_an_embedding_of_no_token_is_empty(has_zeros: bool) -> None:
    weight = group_weight(4, 32, 16, has_zeros)
    assert ops.embedding(torch.empty(0, dtype=torch.int64), weight).shape == (0, 32)


def test_an_embedding_expands_to_the_dtype_of_the_weight() -> None:
    channels, groups = channel_weight(4, 32), group_weight(4, 32, 16, has_zeros=False)
    ids = torch.tensor([3, 0])
    for weight in (
        ChannelWeight(channels.values, channels.scales, torch.bfloat16),
        GroupWeight(groups.packed, groups.scales, None, 16, torch.bfloat16),
    ):
        assert ops.embedding(ids, weight).dtype == torch.bfloat16


def test_the_low_half_of_a_byte_is_the_even_column() -> None:
    packed = torch.tensor([[0x29, 0xF0]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 2.0]])
    weight = GroupWeight(packed, scales, None, group_size=2)
    assert dequantize(weight).tolist() == [[0.5, -3.0, -16.0, 14.0]]
    zeros = torch.tensor([[9.0, 0.0]])
    weight = GroupWeight(packed, scales, zeros, group_size=2)
    assert dequantize(weight).tolist() == [[0.0, -3.5, 0.0, 30.0]]


# ---------------------------------------------------------------- stacks


@given(first=weights(), num_rows=st.integers(1, 5))
def test_stacking_like_formats_makes_one_weight(first: RowWeight, num_rows: int) -> None:
    rows = torch.arange(num_rows) % first.shape[0]
    second = _taken(first, rows)
    stacked = stack_rows([first, second, first])
    assert type(stacked) is type(first)
    assert stacked.shape == (2 * first.shape[0] + num_rows, first.shape[1])
    elements = dequantize(first)
    assert torch.equal(dequantize(stacked), torch.cat((elements, elements[rows], elements)))


def _taken(weight: RowWeight, rows: Tensor) -> RowWeight:
    """Some rows of a weight."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values[rows])
    if isinstance(weight, BlockWeight):
        return BlockWeight(weight.raw[rows], weight.block_format, weight.dtype)
    if isinstance(weight, ChannelWeight):
        return ChannelWeight(weight.values[rows], weight.scales[rows])
    zeros = None if weight.zeros is None else weight.zeros[rows]
    return GroupWeight(weight.packed[rows], weight.scales[rows], zeros, weight.group_size)


def test_stacking_unlike_formats_keeps_the_parts() -> None:
    parts: list[RowWeight] = [
        channel_weight(3, 256),
        group_weight(2, 256, 32, has_zeros=True),
        group_weight(2, 256, 32, has_zeros=False),
        group_weight(2, 256, 64, has_zeros=False),
        random_blocks(FORMAT_BY_NAME["Q4_0"], 4, 8),
        random_blocks(FORMAT_BY_NAME["Q6_K"], 4, 1),
        DenseWeight(torch.randn(2, 256)),
        ChannelWeight(torch.ones(1, 256, dtype=torch.int8), torch.ones(1), torch.bfloat16),
    ]
    for first in parts:
        for second in parts:
            stacked = stack_rows([first, second])
            assert isinstance(stacked, StackedWeight) == (first is not second)
    stacked = stack_rows(parts[:-1])
    assert stacked.shape == (19, 256)
    inputs, bias = torch.randn(3, 256), torch.randn(19)
    values = np.concatenate([expected_values(part) for part in parts[:-1]])
    check_product(ops.linear(inputs, stacked, bias), inputs, values, bias)


def test_a_stack_of_one_is_the_part_itself() -> None:
    weight = channel_weight(3, 8)
    assert stack_rows([weight]) is weight
