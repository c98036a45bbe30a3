"""Ragged paged attention: prefill and decode rows of one step, over a pool in any KV format.

Which rows go to which programs is decided on the host once a step (`kernels.triton.attention_plan`); this starts the
kernel for whole tiles, for parts, and the merge of the parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.kv_view import KVView
from kernels.step import StepMetadata
from kernels.triton import settings
from kernels.triton.attention_kernel import WORK_FIELDS, attention_kernel
from kernels.triton.attention_plan import Shape, make_plan
from kernels.triton.kv_formats import readable
from kernels.triton.launch import current_card, launch
from kernels.triton.merging import WORK_FIELDS as MERGE_FIELDS
from kernels.triton.merging import merge_rows
from kernels.triton.tables import AttentionTile
from kernels.triton.tuning import PROGRAMS_A_MULTIPROCESSOR, attention_tile

_LOG2_E = 1 / math.log(2)
_LEAST_DOT = 16  # the smallest side of a product


@dataclass(frozen=True, slots=True)
class Operands:
    """What attention reads, as `kernels.ops.paged_attention` takes it."""

    query: Tensor
    layer: KVView
    metadata: StepMetadata
    scale: float
    window: int | None
    soft_cap: float | None


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step's work on the device, and memory that one layer after the other uses for its parts.

    whole: `[items, WORK_FIELDS]` int32. split: likewise. merges: `[rows, MERGE_FIELDS]` int32.
    outputs: `[partial rows, Hq, D]` float32. log_sums: `[partial rows, Hq]` float32.
    """

    whole: Tensor
    split: Tensor
    merges: Tensor
    outputs: Tensor
    log_sums: Tensor


def paged_attention(
    query: Tensor,
    layer: KVView,
    metadata: StepMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    split_tokens: int | None = None,
) -> Tensor:
    """See `kernels.ops.paged_attention`.

    split_tokens: positions of a part, counted from 0, for every row; None takes the process's setting, and without
    one the batch and the card decide.
    """
    assert query.stride(-1) == 1, "heads are contiguous"
    operands = Operands(query, layer, metadata, scale, window, soft_cap)
    shape = _shape(operands, settings.split_tokens() if split_tokens is None else split_tokens)
    plan = metadata.once(shape, lambda: _place(operands, shape))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if len(plan.whole):
        _run(plan.whole, shape.whole_tile, operands, sinks, output, None)
    if len(plan.split):
        _run(plan.split, shape.split_tile, operands, None, plan.outputs, plan.log_sums)
        merge_rows(plan.outputs, plan.log_sums, sinks, plan.merges, output)
    return output


def _shape(operands: Operands, split_tokens: int | None) -> Shape:
    query, layer = operands.query, operands.layer
    split_tile = attention_tile("split", query.dtype, layer.head_dim)
    assert split_tokens is None or split_tokens % split_tile.block_positions == 0, (
        f"split_tokens: {split_tokens} must be a multiple of {split_tile.block_positions}, the tile"
    )
    return Shape(
        num_kv_heads=layer.num_kv_heads,
        group_size=query.shape[1] // layer.num_kv_heads,
        window=operands.window,
        split_tokens=split_tokens,
        num_programs=current_card().num_multiprocessors * PROGRAMS_A_MULTIPROCESSOR,
        whole_tile=attention_tile("prefill", query.dtype, layer.head_dim),
        split_tile=split_tile,
    )


def _place(operands: Operands, shape: Shape) -> DevicePlan:
    """Plan a step and put the plan where kernels read it."""
    query = operands.query
    plan = make_plan(operands.metadata.query_start, operands.metadata.seq_lens, shape)
    partials = (plan.num_partials, *query.shape[1:])

    def placed(fields: list[int], width: int) -> Tensor:
        return torch.tensor(fields, dtype=torch.int32, device=query.device).view(-1, width)

    return DevicePlan(
        whole=placed(plan.whole, WORK_FIELDS),
        split=placed(plan.split, WORK_FIELDS),
        merges=placed(plan.merges, MERGE_FIELDS),
        outputs=torch.empty(partials, dtype=torch.float32, device=query.device),
        log_sums=torch.empty(partials[:2], dtype=torch.float32, device=query.device),
    )


def _run(
    work: Tensor,
    tile: AttentionTile,
    operands: Operands,
    sinks: Tensor | None,
    output: Tensor,
    log_sums: Tensor | None,
) -> None:
    """Start the kernel over `work`; with log_sums the outputs are partial."""
    query, layer, metadata = operands.query, operands.layer, operands.metadata
    window, soft_cap = operands.window, operands.soft_cap
    tables = metadata.once("triton tables", lambda: metadata.block_tables.to(query.device))
    values, kv_format = readable(layer)
    group_size = query.shape[1] // layer.num_kv_heads
    launch(
        attention_kernel,
        (len(work), layer.num_kv_heads),
        query,
        values,
        values if layer.scales is None else layer.scales,  # where there are none, never read
        query if sinks is None else sinks,  # likewise
        tables,
        work,
        output,
        output if log_sums is None else log_sums,  # likewise
        *query.stride()[:2],
        *values.stride()[:4],
        *((0, 0, 0) if layer.scales is None else layer.scales.stride()[:3]),
        tables.stride(0),
        layer.head_dim,
        operands.scale * _LOG2_E if soft_cap is None else operands.scale / soft_cap,
        1.0 if soft_cap is None else soft_cap * _LOG2_E,
        0 if window is None else window,
        GROUP=group_size,
        BLOCK_SIZE=layer.block_size,
        BLOCK_ROWS=max(tile.block_rows, triton.next_power_of_2(group_size)),
        BLOCK_POSITIONS=tile.block_positions,
        BLOCK_DIM=max(_LEAST_DOT, triton.next_power_of_2(layer.head_dim)),
        FORMAT=kv_format,
        HAS_SCALES=layer.scales is not None,
        HAS_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        IS_SPLIT=log_sums is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
