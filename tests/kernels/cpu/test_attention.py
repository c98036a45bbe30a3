"""Attention and KV writes of the host kernels against dense attention, over a poisoned pool, on every variant."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from torch import Tensor

from kernels import ops, reference
from kernels.cpu.backend import HostBackend
from tests.support.host_kernels import NUM_THREADS, assert_same_bits, backends, examples
from tests.support.paged_steps import Case, Step, cases
from tests.support.poison import poisoned_memory

TOLERANCE = 5e-6


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
            torch.testing.assert_close(result.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
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


def test_heads_of_any_width() -> None:
    """Positions that a tile has and the sequence has not are zeros as wide as a head."""
    for head_dim in (512, 520, 1040):
        check(Case(((70, 3), (0, 17)), num_kv_heads=1, group_size=2, head_dim=head_dim, window=20))


def test_a_row_has_the_same_bits_however_its_sequence_is_cut() -> None:
    """Rows alone, in chunks and among others; threads that split the chunks of one sequence or not."""
    whole = Case(((0, 1100),), head_dim=32, seed=5)
    for backend in backends()[:2]:
        _, expected, step = pool_and_result(whole, backend)
        for count, end in ((1, 1100), (7, 1100), (200, 1100), (1, 1030), (64, 1024), (1, 64)):
            metadata = replace(step.metadata, query_start=(0, count), seq_lens=(end,), derived={})
            query = step.query[end - count : end].contiguous()
            for own in (backend, HostBackend(1, backend.team.variant), HostBackend(NUM_THREADS)):
                actual = own.paged_attention(query, step.layer, metadata, whole.scale)
                assert_same_bits(actual, expected[end - count : end], f"{count} rows to {end}")
