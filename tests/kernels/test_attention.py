"""write_kv and paged_attention against a naive dense attention, on random ragged steps over a poisoned pool."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops
from kernels.kv_view import KVView
from kernels.step import StepMetadata

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """Sequences (context before the step, rows in the step) and the attention's parameters."""

    sequences: tuple[tuple[int, int], ...]
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 8
    window: int | None = None
    soft_cap: float | None = None
    seed: int = 0


cases = st.builds(
    Case,
    sequences=st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from([1, 1, 1, 2, 15, 16, 17, 40])),
        min_size=1,
        max_size=7,
    ).map(tuple),
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 4),
    head_dim=st.sampled_from([4, 8, 32]),
    window=st.one_of(st.none(), st.integers(1, 80)),
    soft_cap=st.one_of(st.none(), st.just(5.0)),
    seed=st.integers(0, 2**31),
)


class Step:
    """One step over a pool that holds NaN wherever nothing was written, with blocks in random places."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        lengths = [before + rows for before, rows in case.sequences]
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        num_blocks = sum(counts) + 3
        order = random.Random(case.seed).sample(range(1, num_blocks), num_blocks - 1)
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = torch.tensor(order[:count])
            order = order[count:]
        slots, starts = [], [0]
        for row, (before, rows) in enumerate(case.sequences):
            positions = torch.arange(before, before + rows)
            blocks = tables[row, positions // BLOCK_SIZE].long()
            slots.append(blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
            starts.append(starts[-1] + rows)
        self.metadata = StepMetadata(torch.cat(slots), tables, tuple(starts), tuple(lengths))
        heads, dim = case.num_kv_heads, case.head_dim
        # A layer in the middle of a block: strided as in a real pool.
        pool = torch.full((num_blocks, 3, heads, 2, BLOCK_SIZE, dim), math.nan)
        self.view = pool[:, 1]
        self.keys = [self.random(length, heads, dim) for length in lengths]
        self.values = [self.random(length, heads, dim) for length in lengths]
        self.query = self.random(starts[-1], heads * case.group_size, dim)
        self._write_context()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _write_context(self) -> None:
        for row, (before, _) in enumerate(self.case.sequences):
            for position in range(before):
                block = int(self.metadata.block_tables[row, position // BLOCK_SIZE])
                self.view[block, :, 0, position % BLOCK_SIZE] = self.keys[row][position]
                self.view[block, :, 1, position % BLOCK_SIZE] = self.values[row][position]

    def write_step(self) -> None:
        pairs = list(zip(self.case.sequences, self.keys, strict=True))
        key = torch.cat([keys[before:] for (before, _), keys in pairs])
        pairs = list(zip(self.case.sequences, self.values, strict=True))
        value = torch.cat([values[before:] for (before, _), values in pairs])
        ops.write_kv(key, value, KVView(self.view), self.metadata)

    def attend(self, scale: float) -> Tensor:
        window, soft_cap = self.case.window, self.case.soft_cap
        return ops.paged_attention(
            self.query, KVView(self.view), self.metadata, scale, window, soft_cap
        )

    def expected(self, scale: float) -> Tensor:
        """Row by row, over exactly the positions a row sees, in float64."""
        rows = []
        for sequence, (before, num_rows) in enumerate(self.case.sequences):
            for row in range(num_rows):
                position = before + row
                window = self.case.window or position + 1
                seen = slice(max(0, position + 1 - window), position + 1)
                query = self.query[self.metadata.query_start[sequence] + row].double()
                keys = self._per_head(self.keys[sequence][seen])
                values = self._per_head(self.values[sequence][seen])
                scores = torch.einsum("hd,lhd->hl", query, keys) * scale
                if self.case.soft_cap is not None:
                    scores = self.case.soft_cap * torch.tanh(scores / self.case.soft_cap)
                rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values))
        return torch.stack(rows).float()

    def _per_head(self, values: Tensor) -> Tensor:
        return values.double().repeat_interleave(self.case.group_size, dim=1)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_equals_dense_attention(case: Case) -> None:
    step = Step(case)
    step.write_step()
    scale = case.head_dim**-0.5
    torch.testing.assert_close(step.attend(scale), step.expected(scale), atol=2e-5, rtol=2e-5)


def test_two_hundred_sequences_of_one_row() -> None:
    lengths = random.Random(3).choices(range(400), k=200)
    step = Step(Case(sequences=tuple((length, 1) for length in lengths)))
    step.write_step()
    torch.testing.assert_close(step.attend(0.3), step.expected(0.3), atol=2e-5, rtol=2e-5)


def test_single_rows_are_gathered_together() -> None:
    """Neither padding without bound nor one call a sequence."""
    from kernels.reference.attention import _plan

    lengths = random.Random(3).choices(range(1000), k=200)
    step = Step(Case(sequences=tuple((length, 1) for length in lengths), head_dim=4))
    pieces = _plan(step.metadata, BLOCK_SIZE, None, torch.float32)
    gathered = sum(piece.blocks.numel() for piece in pieces) * BLOCK_SIZE
    assert len(pieces) < 12
    assert gathered < 1.4 * sum(lengths)


def test_rows_of_slot_minus_one_are_written_nowhere() -> None:
    step = Step(Case(sequences=((0, 20), (30, 1))))
    step.metadata.slot_mapping[torch.tensor([3, 20])] = -1
    before = step.view.clone()
    step.write_step()
    written = ~step.view[:, 0, 0, :, 0].isnan()
    assert int((written & before[:, 0, 0, :, 0].isnan()).sum()) == 19
    first_block = int(step.metadata.block_tables[0, 0])
    assert bool(step.view[first_block, :, :, 3].isnan().all())


def test_other_layers_of_a_block_stay_untouched() -> None:
    step = Step(Case(sequences=((5, 20),)))
    pool = step.view._base
    assert pool is not None
    step.write_step()
    assert bool(pool[:, 0].isnan().all())
    assert bool(pool[:, 2].isnan().all())


def test_poisoned_slots_outside_a_window_do_not_reach_the_result() -> None:
    """A window that starts inside a block: earlier slots of that block may have been freed and reused."""
    step = Step(Case(sequences=((40, 1), (70, 5)), window=10))
    step.write_step()
    scale = 0.5
    expected = step.expected(scale)
    for row, (before, rows) in enumerate(step.case.sequences):
        for position in range(before + rows - rows - 10 + 1):
            block = int(step.metadata.block_tables[row, position // BLOCK_SIZE])
            step.view[block, :, :, position % BLOCK_SIZE] = math.nan
    torch.testing.assert_close(step.attend(scale), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    step = Step(Case(sequences=((20, 1), (0, 33), (100, 1))))
    step.write_step()
    expected = step.expected(0.35)
    half = KVView(step.view.to(dtype))
    actual = ops.paged_attention(step.query.to(dtype), half, step.metadata, 0.35)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, atol=3e-2, rtol=3e-2)


def test_a_pool_of_half_precision_under_float32_activations() -> None:
    step = Step(Case(sequences=((20, 1), (0, 33), (100, 1))))
    expected = step.expected(0.35)
    step.view = step.view.to(torch.bfloat16)
    step.write_step()
    actual = step.attend(0.35)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=3e-2, rtol=3e-2)


def test_copy_blocks_copies_whole_blocks_in_order() -> None:
    pool = torch.arange(5, dtype=torch.uint8)[:, None].repeat(1, 8)
    ops.copy_blocks(pool, [(1, 2), (2, 4)])
    assert pool[:, 0].tolist() == [0, 1, 1, 3, 1]
