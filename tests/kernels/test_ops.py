"""The row-wise operations and products against their formulas."""

import pytest
import torch
import torch.nn.functional as F

from core.errors import ConfigError
from kernels import ops
from kernels.gguf_formats import FORMAT_BY_NAME
from kernels.reference.gguf_blocks import dequantize
from kernels.weights import BlockWeight, DenseWeight, PackedWeight, StackedWeight, stack_rows


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def block_weight(num_rows: int, num_columns: int) -> BlockWeight:
    block_format = FORMAT_BY_NAME["Q8_0"]
    raw = torch.randint(0, 256, (num_rows, block_format.row_bytes(num_columns)), dtype=torch.uint8)
    halves = raw.view(num_rows, -1, block_format.block_bytes)
    halves[:, :, :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return BlockWeight(raw, block_format, torch.float32)


def expanded(weight: BlockWeight) -> torch.Tensor:
    return dequantize(weight.raw, weight.block_format, torch.float32)


def test_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'cuda' is unknown; known: reference"):
        ops.use_backend("cuda")


def test_rms_norm() -> None:
    hidden, weight = torch.randn(3, 8), torch.randn(8)
    expected = F.rms_norm(hidden, (8,), weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(hidden, weight, 1e-5), expected)


def test_rms_norm_of_half_precision_takes_the_mean_in_float32() -> None:
    hidden = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square exceeds float16
    assert ops.rms_norm(hidden, torch.ones(4, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 4]


def test_add_rms_norm_returns_norm_and_sum() -> None:
    hidden, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = hidden + residual
    normed, summed = ops.add_rms_norm(hidden, residual, weight, 1e-5)
    torch.testing.assert_close(summed, total)
    torch.testing.assert_close(normed, F.rms_norm(total, (8,), weight, 1e-5))


def test_silu_mul() -> None:
    gate_up = torch.randn(3, 10)
    expected = F.silu(gate_up[:, :5]) * gate_up[:, 5:]
    torch.testing.assert_close(ops.silu_mul(gate_up), expected)


def test_rope_rotates_element_i_with_element_i_plus_half() -> None:
    heads, angles = torch.randn(4, 2, 6), torch.randn(4, 3)
    rotated = ops.rope(heads, angles.cos(), angles.sin())
    pairs = torch.complex(heads[..., :3], heads[..., 3:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(rotated, torch.cat((turned.real, turned.imag), dim=-1))


def test_rope_leaves_its_input_alone() -> None:
    heads, angles = torch.randn(4, 2, 6), torch.randn(4, 3)
    before = heads.clone()
    ops.rope(heads, angles.cos(), angles.sin())
    assert torch.equal(heads, before)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 33, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_over_dense_weights(num_rows: int, has_bias: bool) -> None:
    inputs, values = torch.randn(num_rows, 24), torch.randn(40, 24)
    bias = torch.randn(40) if has_bias else None
    expected = F.linear(inputs.double(), values.double(), None if bias is None else bias.double())
    actual = ops.linear(inputs, DenseWeight(values), bias)
    torch.testing.assert_close(actual, expected.float())


def test_linear_over_blocks_equals_linear_over_expanded_blocks() -> None:
    weight, inputs, bias = block_weight(12, 64), torch.randn(3, 64), torch.randn(12)
    expected = F.linear(inputs, expanded(weight), bias)
    torch.testing.assert_close(ops.linear(inputs, weight, bias), expected)


def test_embedding_of_dense_and_block_weights() -> None:
    weight = block_weight(12, 64)
    ids = torch.tensor([3, 3, 11])
    expected = expanded(weight)[ids]
    assert torch.equal(ops.embedding(ids, weight), expected)
    assert torch.equal(ops.embedding(ids, DenseWeight(expanded(weight))), expected)


def test_stacking_like_formats_makes_one_weight() -> None:
    first, second = block_weight(4, 64), block_weight(8, 64)
    stacked = stack_rows([first, second])
    assert isinstance(stacked, BlockWeight)
    assert stacked.shape == (12, 64)
    assert torch.equal(expanded(stacked), torch.cat((expanded(first), expanded(second))))
    dense = stack_rows([DenseWeight(torch.ones(2, 3)), DenseWeight(torch.zeros(1, 3))])
    assert isinstance(dense, DenseWeight)
    assert dense.shape == (3, 3)


def test_stacking_unlike_formats_keeps_the_parts() -> None:
    blocks, dense = block_weight(4, 64), DenseWeight(torch.randn(2, 64))
    stacked = stack_rows([blocks, dense])
    assert isinstance(stacked, StackedWeight)
    assert stacked.shape == (6, 64)
    inputs, bias = torch.randn(3, 64), torch.randn(6)
    rows = torch.cat((expanded(blocks), dense.values))
    torch.testing.assert_close(ops.linear(inputs, stacked, bias), F.linear(inputs, rows, bias))


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_over_packed_weights(num_rows: int, has_bias: bool) -> None:
    inputs, values = torch.randn(num_rows, 24), torch.randn(200, 24)
    bias = torch.randn(200) if has_bias else None
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
        block_weight(200, 32),
    ):
        assert ops.pack(weight) is weight
