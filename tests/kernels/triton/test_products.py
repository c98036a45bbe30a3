"""Products and embeddings over weights of every format against the reference.

Expanded weights are equal bit for bit. Products are held to the float64 product of the same weights, with an error
measured against the sum of magnitudes, as rounding is: 2e-6 in float32; in half precision two units in the last place
of the result, and 2e-4 for scales that K formats keep as float16.
"""

import pytest
import torch
from torch import Tensor

from kernels import reference, triton
from kernels.gguf_formats import FORMAT_BY_NAME, FORMATS
from kernels.reference.quants import dequantize
from kernels.triton.planes import Planes
from kernels.weights import (
    BlockWeight,
    ChannelWeight,
    DenseWeight,
    GroupWeight,
    PackedWeight,
    RowWeight,
    StackedWeight,
    Weight,
)
from tests.support.random_weights import QUANTIZED_FORMATS, random_blocks
from tests.support.triton_device import DEVICE, batch_invariance, on_device

PRODUCT_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NUM_OUTPUTS = 20  # less than a tile; MANY_OUTPUTS are more
MANY_OUTPUTS = 40


def blocks(
    name: str, dtype: torch.dtype = torch.float32, num_rows: int = NUM_OUTPUTS
) -> BlockWeight:
    weight = random_blocks(FORMAT_BY_NAME[name], num_rows, 1 if "K" in name else 5)
    return BlockWeight(weight.raw, weight.block_format, dtype)


def channels(num_columns: int, dtype: torch.dtype = torch.float32) -> ChannelWeight:
    values = torch.randint(-127, 128, (NUM_OUTPUTS, num_columns), dtype=torch.int8)
    return ChannelWeight(values, torch.rand(NUM_OUTPUTS) / 100, dtype)


def groups(
    group_size: int, has_zeros: bool, dtype: torch.dtype = torch.float32, num_groups: int = 3
) -> GroupWeight:
    packed = torch.randint(0, 256, (NUM_OUTPUTS, num_groups * group_size // 2), dtype=torch.uint8)
    scales = torch.rand(NUM_OUTPUTS, num_groups) / 10
    zeros = 15 * torch.rand(NUM_OUTPUTS, num_groups) if has_zeros else None
    return GroupWeight(packed, scales, zeros, group_size, dtype)


def there(weight: Weight) -> Weight:
    """The same weight where the kernels run."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values.to(DEVICE))
    if isinstance(weight, BlockWeight):
        return BlockWeight(on_device(weight.raw), weight.block_format, weight.dtype)
    if isinstance(weight, ChannelWeight):
        return ChannelWeight(on_device(weight.values), on_device(weight.scales), weight.dtype)
    if isinstance(weight, GroupWeight):
        zeros = None if weight.zeros is None else on_device(weight.zeros)
        scales = on_device(weight.scales)
        return GroupWeight(on_device(weight.packed), scales, zeros, weight.group_size, weight.dtype)
    assert isinstance(weight, StackedWeight)
    return StackedWeight(tuple(there(part) for part in weight.parts))


def exact_values(weight: RowWeight) -> Tensor:
    """The weight's numbers in float64, before any rounding to its dtype."""
    if isinstance(weight, BlockWeight):
        weight = BlockWeight(weight.raw, weight.block_format, torch.float32)
    elif isinstance(weight, ChannelWeight):
        weight = ChannelWeight(weight.values, weight.scales)
    elif isinstance(weight, GroupWeight):
        weight = GroupWeight(weight.packed, weight.scales, weight.zeros, weight.group_size)
    return dequantize(weight).double()


def check_product(
    values: Tensor, weight: Weight, num_rows: int, dtype: torch.dtype, has_bias: bool = True
) -> None:
    """`linear` over `weight`, whose numbers are `values [N, K]`, against float64."""
    num_outputs, num_columns = values.shape
    inputs = (torch.randn(num_rows, num_columns) / 64).to(dtype)  # the blocks' scales are near 1
    bias = torch.randn(num_outputs).to(dtype) if has_bias else None
    device_bias = None if bias is None else on_device(bias)
    actual = triton.linear(on_device(inputs), weight, device_bias)
    assert actual.dtype == dtype
    expected = inputs.double() @ values.T + (0 if bias is None else bias.double())
    magnitude = inputs.double().abs() @ values.abs().T + 1
    error = (actual.cpu().double() - expected).abs()
    assert bool(error.isfinite().all())
    allowed = PRODUCT_TOLERANCE[dtype] * expected.abs()
    allowed += (2e-6 if dtype == torch.float32 else 2e-4) * magnitude
    assert bool((error <= allowed).all()), float((error - allowed).max())


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("name", [block_format.name for block_format in FORMATS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_of_blocks_is_exact(name: str, dtype: torch.dtype) -> None:
    weight, token_ids = blocks(name, dtype), torch.tensor([3, 3, NUM_OUTPUTS - 1, 0])
    actual = triton.embedding(on_device(token_ids), there(weight))
    assert torch.equal(actual.cpu(), reference.embedding(token_ids, weight))


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_over_packed_blocks(name: str, dtype: torch.dtype) -> None:
    weight = blocks(name, dtype)
    packed = triton.pack(there(weight))
    assert isinstance(packed, PackedWeight)
    assert packed.shape == weight.shape
    check_product(exact_values(weight), packed, 3, dtype)


@pytest.mark.parametrize("name", ["Q4_0", "Q2_K", "Q5_1", "Q6_K"])
@pytest.mark.parametrize("num_rows", [1, 17, 70])
def test_linear_of_many_rows_over_packed_blocks(name: str, num_rows: int) -> None:
    """Every class of tiles, and edges in both directions; float16, which keeps scales like bfloat16."""
    weight = blocks(name, torch.float16, MANY_OUTPUTS)
    check_product(exact_values(weight), triton.pack(there(weight)), num_rows, torch.float16, False)


@pytest.mark.parametrize("name", ["Q4_1", "Q3_K", "F16", "BF16", "F32"])
def test_linear_over_blocks_as_they_are(name: str) -> None:
    weight = blocks(name)
    check_product(exact_values(weight), there(weight), 3, torch.float32)


@pytest.mark.parametrize("name", ["F16", "F32"])
def test_plain_blocks_are_packed_as_plain_elements(name: str) -> None:
    weight = blocks(name)
    packed = triton.pack(there(weight))
    assert isinstance(packed, DenseWeight)
    assert torch.equal(packed.values.cpu(), dequantize(weight))


# ---------------------------------------------------------------- int8, int4, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 64), (3, 70), (20, 33), (65, 100)])
def test_linear_over_channels(dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
    weight = channels(num_columns, dtype)
    check_product(exact_values(weight), triton.pack(there(weight)), num_rows, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("group_size", "num_groups", "half"),
    [(16, 4, 16), (32, 3, 16), (32, 4, 32), (64, 2, 32), (96, 2, 16), (128, 2, 32)],
)
def test_linear_over_groups(
    dtype: torch.dtype, group_size: int, num_groups: int, half: int
) -> None:
    weight = groups(group_size, group_size != 64, dtype, num_groups)
    packed = triton.pack(there(weight))
    assert isinstance(packed, PackedWeight)
    assert isinstance(packed.packed, Planes)
    assert packed.packed.quants.shape[2] == half
    assert (packed.packed.num_rows, packed.packed.num_columns) == weight.shape
    check_product(exact_values(weight), packed, 3, dtype)
    check_product(exact_values(weight), packed, 20, dtype, False)


@pytest.mark.parametrize("group_size", [2, 24])
def test_groups_that_no_chunk_fits_are_expanded(group_size: int) -> None:
    weight = groups(group_size, has_zeros=True)
    packed = triton.pack(there(weight))
    assert isinstance(packed, DenseWeight)
    check_product(exact_values(weight), packed, 2, torch.float32)
    check_product(exact_values(weight), there(weight), 2, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 32), (3, 70), (40, 33)])
def test_linear_over_plain_weights(dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
    values = torch.randn(NUM_OUTPUTS, num_columns).to(dtype)
    check_product(values.double(), DenseWeight(on_device(values)), num_rows, dtype)
    transposed = on_device(values.t().contiguous()).t()  # any stride
    check_product(values.double(), DenseWeight(transposed), num_rows, dtype, False)


def test_embedding_of_other_weights() -> None:
    token_ids = torch.tensor([5, 0, NUM_OUTPUTS - 1])
    plain = DenseWeight(torch.randn(NUM_OUTPUTS, 24))
    for weight in (plain, channels(24), groups(8, has_zeros=True)):
        actual = triton.embedding(on_device(token_ids), there(weight))
        assert torch.equal(actual.cpu(), reference.embedding(token_ids, weight))


def test_linear_over_stacked_weights() -> None:
    parts = (blocks("Q4_0"), DenseWeight(torch.randn(8, 160)), channels(160))
    values = torch.cat([exact_values(part) for part in parts])
    stacked = there(StackedWeight(parts))
    check_product(values, stacked, 3, torch.float32)
    packed = triton.pack(stacked)
    assert packed.shape == (values.shape[0], 160)
    check_product(values, packed, 3, torch.float32)
    assert triton.pack_rows(plain := DenseWeight(torch.ones(2, 2))) is plain


# ---------------------------------------------------------------- batch invariance


@pytest.mark.parametrize("weight", [blocks("Q4_0", torch.float16), blocks("Q6_K", torch.float16)])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(weight: BlockWeight) -> None:
    packed, inputs = triton.pack(there(weight)), torch.randn(70, weight.shape[1]).half()
    plain = DenseWeight(on_device(torch.randn(NUM_OUTPUTS, weight.shape[1]).half()))
    with batch_invariance():
        for each in (packed, plain):
            whole = triton.linear(on_device(inputs), each)
            for row in (0, 16, 69):
                alone = triton.linear(on_device(inputs[row : row + 1]), each)
                assert torch.equal(alone[0], whole[row])
