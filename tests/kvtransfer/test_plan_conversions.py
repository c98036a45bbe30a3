"""Plans between KV dtypes: which conversions lose nothing, and converted blocks carried to their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.kv_layout import KV_DTYPES, Conversion, GroupKind, KVGroup, KVLayout, SlotFormat, is_exact
from engine.kvcache.storage import allocate_pool
from kernels.kv_view import KVView
from kernels.reference.cache import convert_kv
from kernels.reference.kv_formats import dequantize, quantize
from kvtransfer.plan import Extent, build_plan


def make_layout(block_size: int, dtype: str) -> KVLayout:
    group = KVGroup(GroupKind.FULL_ATTENTION, (0, 1, 2), 2, SlotFormat.of(dtype, 4))
    return KVLayout(block_size, (group,))


def every_number(dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows `[n, 4]` of elements of a KV dtype, all of them where they are few, and their scales."""
    element = element_type(dtype)
    generator = torch.Generator().manual_seed(0)
    if dtype == "float32":
        return torch.randn(64, 4, generator=generator), None
    bits = {1: torch.uint8, 2: torch.int16}[element.itemsize]
    first = torch.iinfo(bits).min
    rows = torch.arange(first, torch.iinfo(bits).max + 1).to(bits).view(element).reshape(-1, 4)
    has_scales = SlotFormat.of(dtype, 4).has_scales
    return rows, torch.rand(len(rows), generator=generator) if has_scales else None


def element_type(dtype: str) -> torch.dtype:
    return allocate_pool(make_layout(4, dtype), 2).layer_views()[0].values.dtype


@pytest.mark.parametrize(
    ("source", "destination"), [(a, b) for a in KV_DTYPES for b in KV_DTYPES if a != b]
)
def test_a_conversion_is_exact_when_the_kernel_keeps_every_number(
    source: str, destination: str
) -> None:
    values, scales = every_number(source)
    numbers = dequantize(values, scales, torch.float32)
    like = torch.empty(1, 1, 2, 1, 4, dtype=element_type(destination))
    has_scales = SlotFormat.of(destination, 4).has_scales
    kept = quantize(numbers, KVView(like, torch.empty(1, 1, 2, 1) if has_scales else None))
    is_kept = torch.equal(dequantize(*kept, torch.float32).nan_to_num(1.5), numbers.nan_to_num(1.5))
    assert is_exact(source, destination) is is_kept


def gather(view: KVView, table: list[int], num_tokens: int) -> tuple[torch.Tensor, Any]:
    """`[token, head, K/V, D]` of a layer's elements as bytes, and their scales."""
    size = view.block_size
    slots = [(table[token // size], token % size) for token in range(num_tokens)]
    rows = torch.stack([view.values[block, :, :, slot] for block, slot in slots])
    scales = view.scales
    return rows.view(torch.uint8), None if scales is None else torch.stack(
        [scales[block, :, :, slot] for block, slot in slots]
    )


@pytest.mark.parametrize("dtype", sorted(KV_DTYPES))
def test_converted_blocks_arrive_as_if_written_at_the_destination(dtype: str) -> None:
    """The sender converts whole blocks with the kernel; the plan then moves them into other blocks."""
    source, destination = make_layout(6, "float32"), make_layout(4, dtype)
    plan = build_plan(source, destination, Conversion.LOSSY)
    num_tokens, table, target_table = 11, [2, 1], [3, 1, 2]
    pool, staged, given_to = (
        allocate_pool(layout, 4) for layout in (source, plan.wire, destination)
    )
    generator = torch.Generator().manual_seed(1)
    for layer in pool.layer_views():
        layer.values.copy_(torch.randn(layer.values.shape, generator=generator))
    for layer, staged_layer in zip(pool.layer_views(), staged.layer_views(), strict=True):
        convert_kv(layer, table, staged_layer, table)
    (pair,) = plan.pairs
    for piece in plan.pieces(pair, Extent(0, 0, 3, 0, num_tokens), num_tokens):
        block, target = table[piece.source_position], target_table[piece.cells.position]
        for start, target_start, size in piece.runs:
            carried = staged.tensor[block, start : start + size]
            given_to.tensor[target, target_start : target_start + size] = carried
    for layer, arrived in zip(pool.layer_views(), given_to.layer_views(), strict=True):
        numbers = gather(layer, table, num_tokens)[0].view(torch.float32)
        values, scales = quantize(numbers, arrived)
        rows, row_scales = gather(arrived, target_table, num_tokens)
        assert torch.equal(rows, values.view(torch.uint8))
        if scales is not None:
            assert torch.equal(row_scales, scales)
