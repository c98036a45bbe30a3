"""What a slot holds in every KV dtype: bits against an encoder of its own, round-trip bounds, conversions."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.kv_layout import KV_DTYPES
from engine.kvcache.storage import PoolStorage
from kernels import ops
from kernels.kv_view import KVView
from kernels.step import StepMetadata
from tests.support.kv_codec import (
    LARGEST,
    decode,
    element_bytes,
    encode,
    error_bound,
    fp8_values,
    has_scales,
)
from tests.support.paged_steps import LAYER, Case, make_pool
from tests.support.poison import POISON_BYTE

NUM_BLOCKS = 4
SCALED = [name for name in KV_DTYPES if has_scales(name)]
TORCH_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def random_rows(num_rows: int, num_heads: int, head_dim: int, seed: int) -> Tensor:
    """Heads of very different sizes, among them heads of zeros, outliers and numbers beyond fp8."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, num_heads, head_dim, generator=generator)
    sizes = torch.randint(-8, 8, (num_rows, num_heads, 1), generator=generator)
    rows = torch.ldexp(rows, sizes)
    rows[torch.rand(rows.shape, generator=generator) < 0.05] *= 1000
    rows[torch.rand(num_rows, num_heads, generator=generator) < 0.1] = 0
    return rows


def write(case: Case, key: Tensor, value: Tensor) -> tuple[PoolStorage, KVView]:
    """A poisoned pool with rows in slots from the first block on."""
    storage = make_pool(case, NUM_BLOCKS)
    layer = storage.layer_views(0)[LAYER]
    count = len(key)
    slots = case.block_size + torch.arange(count)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    ops.write_kv(key, value, layer, StepMetadata(slots, tables, (0, count), (count,)))
    return storage, layer


def rows_of(by_block: npt.NDArray, count: int) -> npt.NDArray:
    """`[num_blocks, Hkv, 2, block_size, ...]` -> `[2, rows, Hkv, ...]` of the rows that `write` wrote."""
    by_slot = np.moveaxis(by_block, (2, 0, 3, 1), (0, 1, 2, 3))  # [2, blocks, block_size, Hkv, ...]
    return by_slot.reshape(2, -1, *by_slot.shape[3:])[:, by_slot.shape[2] :][:, :count]


shapes = {
    "num_rows": st.integers(1, 40),
    "num_heads": st.integers(1, 4),
    "head_dim": st.sampled_from([2, 4, 8, 64, 96]),
    "seed": st.integers(0, 2**31),
}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@given(**shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_bits_are_those_of_the_format(
    kv_dtype: str, num_rows: int, num_heads: int, head_dim: int, seed: int, dtype: torch.dtype
) -> None:
    key = random_rows(num_rows, num_heads, head_dim, seed).clamp(-6e4, 6e4).to(dtype)
    value = random_rows(num_rows, num_heads, head_dim, seed + 1).clamp(-6e4, 6e4).to(dtype)
    case = Case((), num_heads, head_dim=head_dim, kv_dtype=kv_dtype)
    _, layer = write(case, key, value)
    expected, scales = encode(torch.stack((key, value)).float().numpy(), kv_dtype)
    np.testing.assert_array_equal(rows_of(element_bytes(layer), num_rows), expected)
    if layer.scales is None:
        assert scales is None
    else:
        assert scales is not None
        np.testing.assert_array_equal(rows_of(layer.scales.numpy(), num_rows), scales)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@given(**shapes)
def test_a_round_trip_loses_no_more_than_the_bound(
    kv_dtype: str, num_rows: int, num_heads: int, head_dim: int, seed: int
) -> None:
    limit = LARGEST.get(kv_dtype, 6e4) if not has_scales(kv_dtype) else 1e30
    key = random_rows(num_rows, num_heads, head_dim, seed).clamp(-limit, limit)
    case = Case((), num_heads, head_dim=head_dim, kv_dtype=kv_dtype)
    _, layer = write(case, key, -key)
    numbers = torch.stack((key, -key)).numpy()
    error = np.abs(rows_of(decode(layer, kv_dtype), num_rows) - numbers.astype(np.float64))
    assert bool((error <= error_bound(numbers, kv_dtype)).all())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_only_the_written_slots_change(kv_dtype: str) -> None:
    case = Case((), 3, head_dim=8, kv_dtype=kv_dtype)
    rows = random_rows(5, 3, 8, 0)
    storage, layer = write(case, rows, rows)
    changed = int((storage.tensor != POISON_BYTE).sum())
    assert changed <= 5 * 3 * storage.layout.groups[0].slot.slot_bytes
    others = rows_of(element_bytes(layer), 2 * 16)[:, 5:]
    assert bool((others == POISON_BYTE).all())


@pytest.mark.parametrize("kv_dtype", TORCH_FP8)
def test_the_codec_of_these_tests_knows_every_code(kv_dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(TORCH_FP8[kv_dtype])
    np.testing.assert_array_equal(codes.double().numpy(), fp8_values(kv_dtype))


@pytest.mark.parametrize("kv_dtype", TORCH_FP8)
def test_fp8_clamps_what_it_cannot_hold(kv_dtype: str) -> None:
    largest = LARGEST[kv_dtype]
    numbers = torch.tensor([largest * 1.01, 1e30, float("inf"), -1e30, -float("inf"), 0.0])
    _, layer = write(Case((), 1, head_dim=6, kv_dtype=kv_dtype), *[numbers.view(1, 1, 6)] * 2)
    held = rows_of(decode(layer, kv_dtype), 1)[0, 0, 0]
    assert held.tolist() == [largest, largest, largest, -largest, -largest, 0.0]


@pytest.mark.parametrize("kv_dtype", SCALED)
def test_a_head_of_zeros_has_the_least_scale_and_reads_as_zeros(kv_dtype: str) -> None:
    rows = torch.zeros(1, 2, 4)
    rows[0, 1] = 1.0
    _, layer = write(Case((), 2, head_dim=4, kv_dtype=kv_dtype), rows, rows)
    assert layer.scales is not None
    scales = layer.scales[1, :, 0, 0]
    assert scales.tolist() == [
        torch.tensor(1e-6).item(),
        (torch.tensor(1.0) / LARGEST[kv_dtype]).item(),
    ]
    assert bool((rows_of(decode(layer, kv_dtype), 1)[0, 0, 0] == 0).all())


@pytest.mark.parametrize("kv_dtype", SCALED)
def test_an_outlier_costs_its_own_head_of_its_own_token_only(kv_dtype: str) -> None:
    rows = random_rows(3, 2, 8, 4).clamp(-2, 2)
    case = Case((), 2, head_dim=8, kv_dtype=kv_dtype)
    _, calm = write(case, rows, rows)
    before = rows_of(decode(calm, kv_dtype), 3)
    rows[1, 0, 3] = 1e6
    _, layer = write(case, rows, rows)
    after = rows_of(decode(layer, kv_dtype), 3)
    is_other = np.ones((2, 3, 2), dtype=bool)
    is_other[:, 1, 0] = False
    np.testing.assert_array_equal(after[is_other], before[is_other])
    np.testing.assert_allclose(after[:, 1, 0, 3], 1e6, rtol=1e-6)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_is_no_number_stays_none(kv_dtype: str) -> None:
    """A broken row must not look healthy after it was stored, and must not touch its neighbours."""
    rows = torch.ones(2, 2, 4)
    rows[0, 1, 2] = float("nan")
    _, layer = write(Case((), 2, head_dim=4, kv_dtype=kv_dtype), rows, rows)
    held = rows_of(decode(layer, kv_dtype), 2)
    assert bool(np.isnan(held[:, 0, 1, 2]).all())
    np.testing.assert_allclose(held[:, 1], 1.0)
    np.testing.assert_allclose(held[:, 0, 0], 1.0)


# ---------------------------------------------------------------- conversion


@pytest.mark.parametrize(("source", "destination"), [*product(KV_DTYPES, KV_DTYPES)])
def test_conversion_is_what_write_kv_makes_of_the_numbers_held(
    source: str, destination: str
) -> None:
    rows = random_rows(40, 3, 8, 6).clamp(-400, 400)
    _, taken = write(Case((), 3, head_dim=8, kv_dtype=source), rows, -rows)
    target = Case((), 3, head_dim=8, kv_dtype=destination)
    storage = make_pool(target, 7)
    given_layer = storage.layer_views(0)[LAYER]
    ops.convert_kv(taken, [2, 1], given_layer, [5, 3])
    numbers = decode(taken, source)[[2, 1]].astype(np.float32)
    expected, scales = encode(numbers, destination)
    np.testing.assert_array_equal(element_bytes(given_layer)[[5, 3]], expected)
    if given_layer.scales is not None:
        np.testing.assert_array_equal(given_layer.scales[[5, 3]].numpy(), scales)
    untouched = storage.tensor[torch.tensor([0, 1, 2, 4, 6])]
    assert bool((untouched == POISON_BYTE).all())
    others = storage.tensor.view(7, 3, -1)[:, [0, 2]]
    assert bool((others == POISON_BYTE).all())


@pytest.mark.parametrize("kv_dtype", [name for name in KV_DTYPES if not has_scales(name)])
def test_conversion_between_equal_plain_formats_changes_no_byte(kv_dtype: str) -> None:
    rows = random_rows(48, 2, 8, 9)
    case = Case((), 2, head_dim=8, kv_dtype=kv_dtype)
    storage, taken = write(case, rows, rows)
    other = make_pool(case, NUM_BLOCKS)
    ops.convert_kv(taken, [1, 2, 3], other.layer_views(0)[LAYER], [1, 2, 3])
    assert torch.equal(other.tensor[1:], storage.tensor[1:])


def test_conversion_of_no_block_does_nothing() -> None:
    case = Case((), 2)
    storage = make_pool(case, NUM_BLOCKS)
    layer = storage.layer_views(0)[LAYER]
    ops.convert_kv(layer, [], layer, [])
    assert bool((storage.tensor == POISON_BYTE).all())


def test_conversion_between_different_shapes_is_our_mistake() -> None:
    first = make_pool(Case((), 2), NUM_BLOCKS).layer_views(0)[LAYER]
    second = make_pool(Case((), 3), NUM_BLOCKS).layer_views(0)[LAYER]
    with pytest.raises(AssertionError, match="one shape"):
        ops.convert_kv(first, [1], second, [1])
