"""Attention over disjoint ranges of positions, put together: a left fold in the order of the ranges."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.numerics import narrow

WORK_FIELDS = 4
"""int32 fields of a merged row: row of the output, first partial row, rows from one partial to the next, partials."""

_FIELDS = tl.constexpr(WORK_FIELDS)


@triton.jit
def _merge_kernel(
    outputs_ptr,
    log_sums_ptr,
    sinks_ptr,
    work_ptr,
    merged_ptr,
    head_dim,
    BLOCK_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One row and head: sums relative to the largest log-sum so far, a sink's logit first where there is one."""
    work = work_ptr + tl.program_id(0) * _FIELDS
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    row, first, step, count = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    element = tl.arange(0, BLOCK_DIM)
    is_element = element < head_dim
    merged = tl.zeros([BLOCK_DIM], dtype=tl.float32)
    largest = float("-inf")
    total = 0.0
    if HAS_SINKS:
        largest = tl.load(sinks_ptr + head)
        total += 1.0
    for number in range(count):
        place = (first + number * step).to(tl.int64) * num_heads + head
        log_sum = tl.load(log_sums_ptr + place)
        higher = tl.maximum(largest, log_sum)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, added = tl.exp(largest - base), tl.exp(log_sum - base)
        output = tl.load(outputs_ptr + place * head_dim + element, mask=is_element, other=0.0)
        output = tl.where(added > 0.0, output, 0.0)  # what weighs nothing may hold anything
        merged = merged * kept + output * added
        total = total * kept + added
        largest = higher
    merged = merged / tl.where(total == 0.0, 1.0, total)
    target = merged_ptr + (row.to(tl.int64) * num_heads + head) * head_dim + element
    tl.store(target, narrow(merged, merged_ptr.dtype.element_ty), mask=is_element)


def merge_rows(
    outputs: Tensor, log_sums: Tensor, sinks: Tensor | None, work: Tensor, merged: Tensor
) -> None:
    """Fold partial rows `[partial rows, Hq, D]` and `[partial rows, Hq]` into rows of `merged [T, Hq, D]`.

    work: `[rows, WORK_FIELDS]` int32, one row of it for each row of `merged` that is written.
    """
    num_heads, head_dim = outputs.shape[-2:]
    launch(
        _merge_kernel,
        (work.shape[0], num_heads),
        outputs,
        log_sums,
        log_sums if sinks is None else sinks,  # never read where there are none
        work,
        merged,
        head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        HAS_SINKS=sinks is not None,
        num_warps=1,
    )


def merge_partials(outputs: Tensor, log_sums: Tensor) -> Tensor:
    """See `kernels.ops.merge_partials`."""
    num_partials, num_rows = outputs.shape[:2]
    outputs, log_sums = outputs.contiguous(), log_sums.contiguous()
    row = torch.arange(num_rows, dtype=torch.int32, device=outputs.device)
    fixed = torch.full_like(row, num_rows), torch.full_like(row, num_partials)
    work = torch.stack((row, row, *fixed), dim=1)  # [T, WORK_FIELDS]
    merged = torch.empty_like(outputs[0])
    merge_rows(outputs.flatten(0, 1), log_sums.flatten(0, 1), None, work, merged)
    return merged
