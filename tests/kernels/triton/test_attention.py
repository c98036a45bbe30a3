"""Ragged paged attention against dense attention in float64 over the numbers that the pool holds.

Tolerances by the type of the queries: float32 2e-5; half types two units in the last place of the result, bfloat16
1.6e-2 and float16 2e-3, for products of rounded weights and values. The pool's format adds nothing: what it holds is
what both sides read. Slots that no row sees are NaN.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.kv_layout import KV_DTYPES
from kernels import triton
from kernels.kv_view import KVView
from kernels.step import StepMetadata
from tests.support.paged_steps import LAYER, Case, Step, cases
from tests.support.triton_device import IS_INTERPRETED, assert_close, batch_invariance, on_device

few = settings(max_examples=6 if IS_INTERPRETED else 150)
MIXED = ((20, 1), (0, 19), (50, 2))


def small_cases(dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[Case]:
    """Steps that the interpreter does in a second."""
    wide = cases(max_context=60, dtypes=dtypes, head_dims=(4, 8, 20))
    return wide.map(
        lambda case: replace(
            case, sequences=case.sequences[:3], num_kv_heads=min(case.num_kv_heads, 2)
        )
    )


class DeviceStep:
    """A step whose pool was filled on the host, poisoned where no row looks, and copied to where the kernels run."""

    def __init__(self, case: Case) -> None:
        self.host = Step(case)
        self.host.write_step()
        self.host.poison_unseen()
        self.case, self.expected = case, self.host.expected()
        storage = self.host.storage
        storage._tensor = on_device(storage.tensor)
        self.layer: KVView = storage.layer_views(0)[LAYER]
        self.query = on_device(self.host.query)
        self.sinks = None if self.host.sinks is None else on_device(self.host.sinks)

    def attend(
        self,
        split_tokens: int | None = None,
        metadata: StepMetadata | None = None,
        query: Tensor | None = None,
    ) -> Tensor:
        return triton.paged_attention(
            self.query if query is None else query,
            self.layer,
            self.host.metadata if metadata is None else metadata,
            self.case.scale,
            self.case.window,
            self.case.soft_cap,
            self.sinks,
            split_tokens,
        )


@few
@given(case=small_cases((torch.float32,)))
def test_any_step(case: Case) -> None:
    step = DeviceStep(case)
    assert_close(step.attend(), step.expected)


@few
@given(case=small_cases((torch.float16, torch.bfloat16)))
def test_any_step_in_half_precision_by_parts(case: Case) -> None:
    step = DeviceStep(case)
    assert_close(step.attend(split_tokens=32), step.expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_format_and_type(kv_dtype: str, dtype: torch.dtype) -> None:
    case = Case(MIXED, num_kv_heads=1, head_dim=16, kv_dtype=kv_dtype, dtype=dtype)
    step = DeviceStep(case)
    assert_close(step.attend(), step.expected)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_every_option(window: int | None, soft_cap: float | None, has_sinks: bool) -> None:
    case = Case(MIXED, group_size=2, window=window, soft_cap=soft_cap, has_sinks=has_sinks)
    step = DeviceStep(case)
    assert_close(step.attend(), step.expected)
    assert_close(step.attend(split_tokens=32), step.expected)


@pytest.mark.parametrize("group_size", [1, 7, 20])
def test_groups_of_query_heads(group_size: int) -> None:
    """One head a KV head, a number that fills no tile, and more than a tile has rows."""
    step = DeviceStep(
        Case(((40, 1), (0, 5)), num_kv_heads=1 + (group_size < 20), group_size=group_size)
    )
    assert_close(step.attend(), step.expected)
    assert_close(step.attend(split_tokens=32), step.expected)


def test_queries_inside_wider_rows() -> None:
    step = DeviceStep(Case(MIXED))
    wide = torch.zeros(len(step.query), 9, 8, device=step.query.device)
    wide[:, 1:7] = step.query
    step.query = wide[:, 1:7]
    assert_close(step.attend(), step.expected)


def test_one_plan_serves_all_layers() -> None:
    step = DeviceStep(Case(MIXED))
    step.attend()
    kept = dict(step.host.metadata.derived)
    assert_close(step.attend(), step.expected)
    assert {key: id(value) for key, value in step.host.metadata.derived.items()} == {
        key: id(value) for key, value in kept.items()
    }


# ---------------------------------------------------------------- batch invariance


def rows_alone(step: DeviceStep, sequence: int, first: int, end: int) -> Tensor:
    """Rows `[first, end)` of a sequence's part of the step, as a step of their own."""
    metadata = step.host.metadata
    start = metadata.query_start[sequence]
    before = step.case.sequences[sequence][0]
    alone = StepMetadata(
        metadata.slot_mapping[start + first : start + end],
        metadata.block_tables[sequence : sequence + 1],
        (0, end - first),
        (before + end,),
    )
    query = step.query[start + first : start + end]
    return step.attend(metadata=alone, query=query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_company_or_chunks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the process's setting: a row alone, in chunks, and in the whole step, with window, cap and sinks."""
    monkeypatch.setattr("kernels.triton.settings.INVARIANT_SPLIT_TOKENS", 32)
    case = Case(MIXED, num_kv_heads=1, window=40, soft_cap=20.0, has_sinks=True, dtype=dtype)
    step = DeviceStep(case)
    with batch_invariance():
        whole = step.attend()
        assert_close(whole, step.expected)
        for sequence, (_, num_rows) in enumerate(case.sequences):
            start = step.host.metadata.query_start[sequence]
            chunks = {(row, row + 1) for row in (0, num_rows // 2, num_rows - 1)}
            chunks |= {(first, min(first + 7, num_rows)) for first in range(0, num_rows, 7)}
            for first, end in chunks | {(0, num_rows)}:
                rows = rows_alone(step, sequence, first, end)
                assert torch.equal(rows, whole[start + first : start + end])


def test_parts_are_whole_tiles() -> None:
    step = DeviceStep(Case(MIXED))
    with pytest.raises(AssertionError, match="split_tokens: 33 must be a multiple of 32"):
        step.attend(split_tokens=33)
