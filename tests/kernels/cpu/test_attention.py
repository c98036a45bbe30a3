"""Attention and KV writes of the host kernels against dense attention, over a poisoned pool, on every variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from kernels import ops, reference
from kernels.cpu.backend import HostBackend
from kernels.step import StepMetadata
from tests.support.host_kernels import NUM_THREADS, assert_same_bits, backends, examples
from tests.support.paged_steps import Case, Step, cases
from tests.support.poison import poisoned_memory

TOLERANCE = 5e-6  # over float32 KV
# Over narrower KV: sums of products fit 32 bits, so vectors and a tile's weights have 2,896 steps or more.
WHOLE_TOLERANCE = 2e-3


def tolerance_of(case: Case) -> float:
    """Heads of more than 256 numbers are read in float32 whatever holds them."""
    return WHOLE_TOLERANCE if case.kv_dtype != "float32" and case.head_dim <= 256 else TOLERANCE


def pool_and_result(case: Case, backend: object) -> tuple[Tensor, Tensor, Step]:
    ops.use_backend(backend)
    try:
        step = Step(case)
        step.write_step()
        with poisoned_memory():
            return step.storage.tensor, step.attend(), step
    finally:
        ops.use_backend(reference)


def check(case: Case) -> None:
    pool, _, _ = pool_and_result(case, reference)
    bits: Tensor | None = None
    for backend in reversed(backends()):
        own_pool, result, step = pool_and_result(case, backend)
        assert torch.equal(own_pool, pool), f"{backend.description}: the pool's bytes differ"
        if bits is None:
            expected = step.expected()
            tolerance = tolerance_of(case)
            torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
            bits = result
        assert_same_bits(result, bits, backend.description)


@examples(60)
@given(case=cases(head_dims=(4, 16, 24, 64)))
def test_equals_dense_attention_over_what_the_pool_holds(case: Case) -> None:
    check(case)


def test_long_sequences_fold_chunk_by_chunk() -> None:
    base = Case(((1500, 3), (2100, 1), (1020, 9)), head_dim=16)
    for case in (base, replace(base, window=1300), replace(base, has_sinks=True, soft_cap=5.0)):
        check(case)
        check(replace(case, kv_dtype="float16"))


def test_rows_that_look_far_back_are_fewer_a_task() -> None:
    """Variants cut them differently, by what they do in a millisecond; to a row it is all the same."""
    check(Case(((1100, 150),), head_dim=16))
    check(Case(((1100, 150),), head_dim=16, kv_dtype="float16"))


def test_heads_of_any_width() -> None:
    """Positions that a tile has and the sequence has not are zeros as wide as a head."""
    for head_dim in (512, 520, 1040):
        check(Case(((70, 3), (0, 17)), num_kv_heads=1, group_size=2, head_dim=head_dim, window=20))
    for head_dim in (80, 96, 128, 208, 256, 264):
        check(Case(((70, 3), (0, 90)), 1, 3, head_dim, kv_dtype="float16", soft_cap=5.0))
        check(Case(((70, 3), (5, 90)), 1, 3, head_dim, kv_dtype="bfloat16", window=20))


def test_a_row_has_the_same_bits_however_its_sequence_is_cut() -> None:
    """Rows alone, in chunks and among others; threads that split the chunks of one sequence or not."""
    check_cuts(Case(((0, 1100),), head_dim=32, seed=5))
    check_cuts(Case(((0, 1100),), head_dim=64, kv_dtype="float16", seed=5))
    check_cuts(Case(((0, 1100),), head_dim=64, kv_dtype="int8_per_token_head", window=90, seed=5))


def check_cuts(whole: Case) -> None:
    for backend in backends()[:2]:
        _, expected, step = pool_and_result(whole, backend)
        for count, end in ((1, 1100), (7, 1100), (200, 1100), (1, 1030), (64, 1024), (1, 64)):
            metadata = replace(step.metadata, query_start=(0, count), seq_lens=(end,), derived={})
            query = step.query[end - count : end].contiguous()
            for own in (backend, HostBackend(1, backend.team.variant), HostBackend(NUM_THREADS)):
                actual = own.paged_attention(query, step.layer, metadata, whole.scale, whole.window)
                assert_same_bits(actual, expected[end - count : end], f"{count} rows to {end}")


def test_sequences_that_begin_with_the_same_blocks_get_what_each_gets_alone() -> None:
    """Whole chunks that several sequences have in common are read once: all, some or none of them, from the front."""
    check_sharing(Case(((0, 3300),), head_dim=32, seed=6))
    check_sharing(Case(((0, 3300),), head_dim=32, kv_dtype="float16", seed=6))


def check_sharing(case: Case) -> None:
    for window in (None, 1500):
        for backend in backends():
            _, _, step = pool_and_result(replace(case, window=window), backend)
            own = step.metadata.block_tables[0]
            chunk = 1024 // step.layer.block_size
            elsewhere = own.clone()
            elsewhere[chunk : 2 * chunk] = own[2 * chunk : 3 * chunk]
            backwards = own.clone()
            backwards[: 2 * chunk] = own[: 2 * chunk].flip(0)
            tables = torch.stack((own, elsewhere, own, backwards, elsewhere, own, own))
            lengths = (3300, 2500, 3000, 2100, 2400, 1024, 1025)
            query = step.query[: len(lengths)].contiguous()
            together = StepMetadata(
                torch.full((len(lengths),), -1),
                tables.contiguous(),
                tuple(range(len(lengths) + 1)),
                lengths,
            )
            actual = backend.paged_attention(query, step.layer, together, case.scale, window)
            expected = reference.paged_attention(query, step.layer, together, case.scale, window)
            torch.testing.assert_close(
                actual, expected, atol=tolerance_of(case), rtol=tolerance_of(case)
            )
            for row, length in enumerate(lengths):
                single = StepMetadata(
                    torch.tensor([-1]), tables[row : row + 1].contiguous(), (0, 1), (length,)
                )
                alone = backend.paged_attention(
                    query[row : row + 1], step.layer, single, case.scale, window
                )
                assert_same_bits(actual[row : row + 1], alone, f"sequence {row}")


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_what_is_damaged_damages_those_who_see_it_and_no_other(kv_dtype: str) -> None:
    """No number, or an infinite one, in K, V or a query: no number for all who see it, nothing new for those before."""
    case = Case(((0, 150),), num_kv_heads=1, group_size=3, head_dim=64, kv_dtype=kv_dtype, seed=7)
    for backend in backends():
        for soft_cap in (None, 5.0):
            _, expected, step = pool_and_result(replace(case, soft_cap=soft_cap), backend)
            for half in (0, 1):
                for bad in (float("nan"), float("inf")):
                    check_damage(backend, step, expected, half, bad)
            for bad in (float("nan"), -float("inf")):
                query = step.query.clone()
                query[70, 1, 9] = bad
                actual = backend.paged_attention(
                    query, step.layer, step.metadata, case.scale, None, soft_cap
                )
                assert actual[70, 1].isnan().all(), backend.description
                assert_same_bits(actual[:70], expected[:70], backend.description)
                assert_same_bits(actual[71:], expected[71:], backend.description)


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_damage_in_one_chunk_outlives_the_merge_with_others(kv_dtype: str) -> None:
    case = Case(((2200, 1),), num_kv_heads=1, group_size=3, head_dim=64, kv_dtype=kv_dtype, seed=8)
    for backend in backends():
        for position in (5, 1500, 2200):
            _, _, step = pool_and_result(case, backend)
            block = int(step.metadata.block_tables[0, position // case.block_size])
            step.layer.values[block, 0, 0, position % case.block_size, 3] = float("nan")
            actual = backend.paged_attention(
                step.query, step.layer, step.metadata, case.scale, None
            )
            assert actual.isnan().all(), f"{backend.description}, position {position}"


def check_damage(backend: HostBackend, step: Step, expected: Tensor, half: int, bad: float) -> None:
    """One number of K or V of position 70, for all rows and for those that see the position or almost do."""
    case, position = step.case, 70
    block = int(step.metadata.block_tables[0, position // case.block_size])
    slot = step.layer.values[block, 0, half, position % case.block_size]
    kept = slot.clone()
    slot[9] = bad
    for rows in (150, 85):
        actual = backend.paged_attention(
            step.query[150 - rows :].contiguous(),
            step.layer,
            replace(step.metadata, query_start=(0, rows), derived={}),
            case.scale,
            None,
            case.soft_cap,
        )
        before = position - (150 - rows)
        assert_same_bits(actual[:before], expected[150 - rows :][:before], backend.description)
        assert actual[before:].isnan().all(), backend.description
    slot.copy_(kept)


def test_vectors_of_any_magnitude() -> None:
    """Zeros, the largest halves and the smallest, V and K: a scale a vector leaves each its own steps."""
    case = Case(((0, 100),), num_kv_heads=1, group_size=3, head_dim=64, kv_dtype="float16", seed=8)
    for backend in backends():
        _, _, step = pool_and_result(case, backend)
        values = step.layer.values
        blocks = step.metadata.block_tables[0].tolist()
        for number, factor in ((3, 0.0), (20, 2e4), (40, 1e-6), (41, 3e-8)):
            slot = values[blocks[number // 16], 0, 1, number % 16]
            slot.copy_((slot.float() * factor).half())
        values[blocks[2], 0, 0, 5] = 0.0
        values[blocks[3], 0, 0, 5] *= 1e-5
        values[blocks[4], 0, 0, 5] *= 2
        actual = backend.paged_attention(step.query, step.layer, step.metadata, case.scale)
        expected = reference.paged_attention(step.query, step.layer, step.metadata, case.scale)
        largest = expected.abs().amax(dim=-1, keepdim=True)
        assert ((actual - expected).abs() <= WHOLE_TOLERANCE * (1 + largest)).all()
