"""Products of the host kernels: every weight format within its bound, the same bits a row, a variant and a thread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.errors import ModelLoadError
from kernels import reference
from kernels.cpu.backend import HostBackend
from kernels.cpu.lowering import host_parts
from kernels.cpu.packing import pack
from kernels.gguf_formats import FORMAT_BY_NAME
from kernels.weights import (
    ChannelWeight,
    DenseWeight,
    GroupWeight,
    StackedWeight,
    Weight,
)
from tests.support.host_kernels import assert_same_bits, backends, examples, on_every_variant
from tests.support.poison import poisoned_memory
from tests.support.random_weights import QUANTIZED_FORMATS, random_blocks

ROWS = (1, 2, 5, 8, 9, 11, 12, 16, 17, 40, 150)
INPUT_LEVELS = 32639
"""Inputs of products with quantised weights are rounded to `scale * q`, |q| <= INPUT_LEVELS, a scale for a row."""
INPUT_STEPS = 1.51
"""How far from its input a rounded one may be: half a step, and one more where a low byte would be -128."""
WHOLE_STEPS = 4.51
"""The same of a whole weight, in units of its row's scale: half of one for `middle`, half of eight for `slope`."""


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(inputs: Tensor, weight: Weight) -> Tensor:
    columns = torch.eye(weight.shape[1])
    return inputs.double() @ reference.linear(columns, weight).double()


def rounding_bound(inputs: Tensor, weight: Weight) -> Tensor:
    """What rounding inputs and weights can change an output by, and as much again for float32 sums."""
    steps = inputs.abs().amax(1, keepdim=True).double() / INPUT_LEVELS * INPUT_STEPS
    sizes = reference.linear(torch.eye(weight.shape[1]), weight).double().abs()  # [K, N]
    magnitude = inputs.double().abs() @ sizes
    rounded = inputs.double().abs().sum(1, keepdim=True) * weight_errors(weight)
    return steps * sizes.sum(0) + rounded + 2e-6 * magnitude + 1e-6


def weight_errors(weight: Weight) -> Tensor:
    """How far an element of each row may be from what it was: float64 `[N]`."""
    errors = [
        torch.zeros(part.native.num_rows) if part.row_scales is None else part.row_scales
        for part in host_parts(weight)
    ]
    return WHOLE_STEPS * torch.cat(errors).double()


def random_weight(name: str, num_rows: int, blocks_a_row: int) -> Weight:
    if name == "int8":
        values = torch.randint(-128, 128, (num_rows, 64 * blocks_a_row)).to(torch.int8)
        return ChannelWeight(values, torch.rand(num_rows) / 64)
    if name.startswith("int4"):
        packed = torch.randint(0, 256, (num_rows, 64 * blocks_a_row), dtype=torch.uint8)
        scales = torch.rand(num_rows, 2 * blocks_a_row) / 8
        zeros = torch.rand(num_rows, 2 * blocks_a_row) * 15 if name == "int4_zeros" else None
        return GroupWeight(packed, scales, zeros, 64)
    return random_blocks(FORMAT_BY_NAME[name], num_rows, blocks_a_row)


@pytest.mark.parametrize("name", [*QUANTIZED_FORMATS, "int8", "int4", "int4_zeros"])
def test_quantised_products_are_within_their_rounding(name: str) -> None:
    weight = random_weight(name, 83, 2)
    packed, bias = pack(weight), normal(3, 83)
    for rows in ROWS:
        inputs = normal(rows, rows, weight.shape[1])
        with poisoned_memory():
            actual = on_every_variant(lambda b, x=inputs: b.linear(x, packed, bias))  # type: ignore[misc]
        error = (actual.double() - bias.double() - exact(inputs, weight)).abs()
        assert bool((error <= rounding_bound(inputs, weight)).all()), f"{name}, {rows} rows"


@examples(25)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 90),
    columns=st.integers(1, 90),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    seed=st.integers(0, 99),
)
def test_dense_products(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    weight = DenseWeight(normal(seed, outputs, columns).to(dtype))
    inputs, packed = normal(seed + 1, rows, columns), pack(weight)
    with poisoned_memory():
        actual = on_every_variant(lambda backend: backend.linear(inputs, packed))
    expected = inputs.double() @ weight.values.double().T
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Q4_1", "Q4_0", "Q8_0", "Q6_K", "Q2_K", "dense"])
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.team.variant)
def test_a_row_has_the_same_bits_among_any_others(backend: HostBackend, name: str) -> None:
    blocks = 2 if name.endswith("K") else 16
    weight = DenseWeight(normal(0, 70, 512)) if name == "dense" else random_weight(name, 70, blocks)
    packed, inputs = pack(weight), normal(1, 150, weight.shape[1])
    alone = torch.cat([backend.linear(row, packed) for row in inputs.split(1)])
    for first, last in ((0, 150), (0, 2), (3, 10), (5, 17), (7, 70), (100, 150)):
        some = backend.linear(inputs[first:last].contiguous(), packed)
        assert_same_bits(some, alone[first:last], f"rows {first} to {last}")
    one_thread = HostBackend(1, backend.team.variant)
    assert_same_bits(one_thread.linear(inputs, packed), alone, "one thread")


def test_stacked_weights_of_several_formats() -> None:
    parts = (
        random_weight("Q4_1", 32, 8),
        random_weight("Q6_K", 20, 1),
        DenseWeight(normal(0, 7, 256)),
    )
    stacked = StackedWeight(parts)  # type: ignore[arg-type]
    inputs, bias = normal(1, 9, 256), normal(2, 59)
    actual = on_every_variant(lambda backend: backend.linear(inputs, stacked, bias))
    own = [backends()[0].linear(inputs, part) for part in parts]
    assert_same_bits(actual, torch.cat(own, dim=1) + bias, "stacked")


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q5_0", "Q6_K", "int8", "int4_zeros"])
def test_embedding_reads_what_the_weight_holds(name: str) -> None:
    weight = random_weight(name, 75, 2)
    token_ids = torch.tensor([74, 0, 16, 15, 33, 0])
    actual = on_every_variant(lambda backend: backend.embedding(token_ids, weight))
    expected = reference.embedding(token_ids, weight).double()
    allowed = weight_errors(weight)[token_ids][:, None] + 1e-6 * expected.abs()
    assert bool(((actual.double() - expected).abs() <= allowed).all())


def test_rows_of_zeros_of_one_outlier_and_of_hardly_anything() -> None:
    weight = pack(random_weight("Q4_1", 40, 8))
    inputs = torch.zeros(4, 256)
    inputs[1, 77] = 1e6
    inputs[2] = 1e-30
    inputs[3] = 1e-36
    actual = on_every_variant(lambda backend: backend.linear(inputs, weight))
    assert not actual[[0, 3]].any()
    assert bool(actual.isfinite().all())


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("damage", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_a_damaged_input_gives_no_numbers_and_harms_no_other(
    name: str, damage: float
) -> None:
    weight = pack(random_weight(name, 40, 8))
    healthy = normal(3, 20, 256)
    inputs = healthy.clone()
    for row, column in ((0, 0), (7, 130), (19, 255)):
        inputs[row, column] = damage
    damaged = torch.zeros(20, dtype=torch.bool)
    damaged[[0, 7, 19]] = True
    expected = backends()[-1].linear(healthy, weight)[~damaged]
    for backend in backends():
        actual = backend.linear(inputs, weight)
        assert bool(actual[damaged].isnan().all()), backend.description
        assert_same_bits(actual[~damaged], expected, backend.description)


@pytest.mark.parametrize("num_columns", [32, 96, 2048, 2080, 4128])
@pytest.mark.parametrize("num_rows", [1, 8, 20])
def test_whole_weights_of_any_number_of_groups(num_columns: int, num_rows: int) -> None:
    """Odd numbers of groups leave half a tile empty; more than 2,048 columns are more than one exact sum."""
    weight = random_blocks(FORMAT_BY_NAME["Q4_1"], 35, num_columns // 32)
    inputs, packed = normal(num_columns, num_rows, num_columns), pack(weight)
    with poisoned_memory():
        actual = on_every_variant(lambda backend: backend.linear(inputs, packed))
    error = (actual.double() - exact(inputs, weight)).abs()
    assert bool((error <= rounding_bound(inputs, weight)).all())


@pytest.mark.parametrize("quant", [0, 15])
@pytest.mark.parametrize("value", [32639.0, -32639.0, 32512.0 + 128, 255.0 * 127 + 127])
def test_the_largest_whole_numbers_do_not_overflow(quant: int, value: float) -> None:
    """2,048 columns at their extreme: every weight 8,183 or so, every byte of the inputs as large as it gets."""
    num_columns = 2048
    packed_quants = torch.full((16, num_columns // 2), 17 * quant, dtype=torch.uint8)
    weight = GroupWeight(packed_quants, torch.ones(16, num_columns // 32), None, 32)
    inputs = torch.full((20, num_columns), value)
    inputs[:, 0] = 32639.0  # so that a step of the inputs is 1
    actual = on_every_variant(lambda backend: backend.linear(inputs, weight))
    error = (actual.double() - exact(inputs, weight)).abs()
    assert bool((error <= rounding_bound(inputs, weight)).all())


def test_a_weight_whose_scale_is_broken_is_refused_by_row() -> None:
    scales = torch.ones(1100, 2)
    scales[1050, 1] = float("inf")
    packed = torch.zeros(1100, 32, dtype=torch.uint8)
    with pytest.raises(ModelLoadError, match=r"row 1050 of a weight reaches (nan|inf)"):
        pack(GroupWeight(packed, scales, None, 32))
