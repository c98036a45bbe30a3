"""Writes to the pool: a step's K and V into their slots, one program a row, all its heads at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_view import KVView
from kernels.step import StepMetadata
from kernels.triton.kv_formats import encode, head_scales, writable
from kernels.triton.launch import launch
from kernels.triton.tuning import row_warps


@triton.jit
def _store_heads(
    source_ptr,
    values_ptr,
    scales_ptr,
    head,
    element,
    mask,
    value_strides,
    scale_strides,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Heads `[H, 1]` x elements `[1, D]` at source_ptr into one slot, whose start both target pointers are at."""
    numbers = tl.load(source_ptr, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        scales = head_scales(numbers, FORMAT)[:, None]
        numbers = tl.div_rn(numbers, scales)
        is_head = tl.max(mask.to(tl.int32), axis=1)[:, None] > 0
        tl.store(scales_ptr + head * scale_strides, scales, mask=is_head)
    elements = encode(numbers, FORMAT, values_ptr.dtype.element_ty)
    tl.store(values_ptr + head * value_strides + element, elements, mask=mask)


@triton.jit
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    slots_ptr,
    values_ptr,
    scales_ptr,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    block_stride,
    head_stride,
    part_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    scale_part_stride,
    num_heads,
    head_dim,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Slot s is slot s % BLOCK_SIZE of block s // BLOCK_SIZE; K is part 0 of a block's head, V part 1."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    element = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (head < num_heads) & (element < head_dim)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = values_ptr + block * block_stride + offset * slot_stride
    scales = scales_ptr
    if HAS_SCALES:
        scales = scales_ptr + block * scale_block_stride + offset
    key = key_ptr + row * key_row_stride + head * key_head_stride + element
    value = value_ptr + row * value_row_stride + head * value_head_stride + element
    _store_heads(
        key, target, scales, head, element, mask, head_stride, scale_head_stride, FORMAT, HAS_SCALES
    )
    target += part_stride
    if HAS_SCALES:
        scales += scale_part_stride
    _store_heads(
        value,
        target,
        scales,
        head,
        element,
        mask,
        head_stride,
        scale_head_stride,
        FORMAT,
        HAS_SCALES,
    )


def write_kv(key: Tensor, value: Tensor, layer: KVView, metadata: StepMetadata) -> None:
    """See `kernels.ops.write_kv`."""
    assert key.stride(-1) == 1 == value.stride(-1), "heads are contiguous"
    slots = metadata.once("triton slots", lambda: metadata.slot_mapping.to(key.device))
    values, kv_format = writable(layer)
    scales = values if layer.scales is None else layer.scales  # never read where there are none
    scale_strides = (0, 0, 0) if layer.scales is None else layer.scales.stride()[:3]
    num_heads, head_dim = layer.num_kv_heads, layer.head_dim
    launch(
        _write_kv_kernel,
        (key.shape[0],),
        key,
        value,
        slots,
        values,
        scales,
        *key.stride()[:2],
        *value.stride()[:2],
        *values.stride()[:4],
        *scale_strides,
        num_heads,
        head_dim,
        BLOCK_SIZE=layer.block_size,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        FORMAT=kv_format,
        HAS_SCALES=layer.scales is not None,
        num_warps=row_warps(num_heads * head_dim),
    )
