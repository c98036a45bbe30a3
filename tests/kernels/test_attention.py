"""write_kv and paged_attention against a naive dense attention, on random ragged steps over a poisoned pool.

Two bounds: what attention adds to the numbers that the pool holds (`TOLERANCE`, by the type of the activations), and
what the pool's own rounding adds to that (`ROUNDING`, by the KV dtype).
"""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from core.kv_layout import KV_DTYPES
from kernels import ops
from tests.support.paged_steps import LAYER, Case, Step, cases
from tests.support.poison import POISON_BYTE, poisoned_memory

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Absolute and relative, for numbers of the size of 1."""

ROUNDING = {
    "float32": 1e-6,
    "float16": 5e-4,
    "bfloat16": 4e-3,
    "int8_per_token_head": 1.2e-2,
    "fp8_per_token_head": 5e-2,
    "fp8_e4m3": 6e-2,
    "fp8_e5m2": 0.12,
}
"""Root mean square of the error over that of the result, for K and V of unit variance."""


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def written(case: Case) -> Step:
    step = Step(case)
    step.write_step()
    return step


@settings(max_examples=120)
@given(case=cases())
def test_equals_dense_attention_over_what_the_pool_holds(case: Case) -> None:
    step = written(case)
    with poisoned_memory():
        actual = step.attend()
    assert_close(actual, step.expected(), TOLERANCE[torch.float32])


@settings(max_examples=60)
@given(case=cases(dtypes=(torch.bfloat16, torch.float16)))
def test_half_precision_is_close(case: Case) -> None:
    step = written(case)
    with poisoned_memory():
        actual = step.attend()
    assert actual.dtype == case.dtype
    assert_close(actual, step.expected(), TOLERANCE[case.dtype])


@settings(max_examples=60)
@given(case=cases(dtypes=tuple(TOLERANCE)))
def test_slots_that_no_row_sees_reach_no_bit_of_the_result(case: Case) -> None:
    step = written(case)
    before = step.attend()
    step.poison_unseen()
    assert torch.equal(step.attend(), before)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rounding_of_the_pool_costs_no_more_than_stated(kv_dtype: str, has_sinks: bool) -> None:
    sequences = ((300, 1), (0, 130), (64, 9), (700, 1))
    step = written(Case(sequences, head_dim=64, kv_dtype=kv_dtype, has_sinks=has_sinks, seed=5))
    expected = step.expected_unrounded()
    error = (step.attend().double() - expected).square().mean().sqrt()
    assert float(error / expected.square().mean().sqrt()) < ROUNDING[kv_dtype]


def test_two_hundred_sequences_of_one_row() -> None:
    lengths = random.Random(3).choices(range(400), k=200)
    step = written(Case(tuple((length, 1) for length in lengths)))
    assert_close(step.attend(), step.expected(), TOLERANCE[torch.float32])


def test_single_rows_are_gathered_together() -> None:
    """Neither padding without bound nor one call a sequence."""
    from kernels.reference.attention import _plan

    lengths = random.Random(3).choices(range(1000), k=200)
    step = Step(Case(tuple((length, 1) for length in lengths), head_dim=4))
    pieces = _plan(step.metadata, step.case.block_size, None, torch.float32)
    gathered = sum(piece.blocks.numel() for piece in pieces) * step.case.block_size
    assert len(pieces) < 12
    assert gathered < 1.4 * sum(lengths)


# ---------------------------------------------------------------- sinks


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    """One position with score 0 beside a sink of log 3: a quarter of the value is left."""
    step = written(Case(((0, 1),), num_kv_heads=1, group_size=2))
    step.query.zero_()
    step.sinks = torch.tensor([3.0, 1.0]).log()
    expected = step.values[0][0, 0] * torch.tensor([[0.25], [0.5]])
    torch.testing.assert_close(step.attend()[0], expected)


def test_a_sink_far_below_every_score_changes_nothing() -> None:
    step = written(Case(((40, 1), (3, 20)), soft_cap=5.0))
    without = step.attend()
    step.sinks = torch.full((step.case.num_heads,), -1e4)
    assert torch.equal(step.attend(), without)


def test_a_sink_far_above_every_score_leaves_nothing() -> None:
    step = written(Case(((40, 1), (3, 20))))
    step.sinks = torch.full((step.case.num_heads,), 1e4)
    assert not bool(step.attend().any())


# ---------------------------------------------------------------- what is written where


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_of_slot_minus_one_are_written_nowhere(kv_dtype: str) -> None:
    step = Step(Case(((0, 20), (30, 1)), kv_dtype=kv_dtype))
    before = step.storage.tensor.clone()
    step.metadata.slot_mapping.fill_(-1)
    step.write_step()
    assert torch.equal(step.storage.tensor, before)


def test_rows_beside_one_of_slot_minus_one_are_written() -> None:
    step = Step(Case(((0, 20), (30, 1))))
    left_out = step.slots(0, [3]).item()
    step.metadata.slot_mapping[torch.tensor([3, 20])] = -1
    step.write_step()
    is_empty = step.layer.values[:, 0, 0, :, 0].isnan().flatten()
    assert int((~is_empty).sum()) == 19 + 30
    assert bool(is_empty[left_out])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_other_layers_of_a_block_stay_untouched(kv_dtype: str) -> None:
    step = written(Case(((5, 20),), kv_dtype=kv_dtype))
    layer_bytes = step.storage.block_bytes // 3
    by_layer = step.storage.tensor.view(-1, 3, layer_bytes)
    others = [by_layer[:, layer] for layer in range(3) if layer != LAYER]
    assert all(bool((other == POISON_BYTE).all()) for other in others)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_dtype_of_activations_and_of_the_pool_are_independent(kv_dtype: str) -> None:
    case = Case(((20, 1), (0, 33), (100, 1)), kv_dtype=kv_dtype)
    for dtype, tolerance in TOLERANCE.items():
        step = written(replace(case, dtype=dtype))
        actual = step.attend()
        assert actual.dtype == dtype
        assert_close(actual, step.expected(), tolerance)


def test_a_step_is_read_by_more_than_one_layer() -> None:
    """What is derived once a step serves layers of the same shape but other content."""
    step = written(Case(((20, 1), (0, 33))))
    other = step.storage.layer_views(0)[0]
    step.storage.tensor.view(step.layer.num_blocks, 3, -1)[:, 0] = step.storage.tensor.view(
        step.layer.num_blocks, 3, -1
    )[:, LAYER]
    first = step.attend()
    other.values.mul_(2.0)
    step.layer = other
    assert not torch.equal(step.attend(), first)
    assert_close(step.attend(), step.expected(), TOLERANCE[torch.float32])


def test_metadata_without_rows_writes_nothing() -> None:
    step = Step(Case(((0, 4),)))
    before = step.storage.tensor.clone()
    empty = replace(step.metadata, slot_mapping=torch.empty(0, dtype=torch.int64), derived={})
    nothing = torch.empty(0, step.case.num_kv_heads, step.case.head_dim)
    ops.write_kv(nothing, nothing, step.layer, empty)
    assert torch.equal(step.storage.tensor, before)
