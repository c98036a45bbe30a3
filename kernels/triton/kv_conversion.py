"""Blocks from one KV format to another: dequantised to float32, then quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_view import KVView
from kernels.triton.kv_formats import decode, encode, head_scales, readable, writable
from kernels.triton.launch import launch
from kernels.triton.numerics import as_type
from kernels.triton.tuning import row_warps


@triton.jit
def _convert_kernel(
    source_ptr,
    source_scales_ptr,
    target_ptr,
    target_scales_ptr,
    source_ids_ptr,
    target_ids_ptr,
    source_block_stride,
    source_head_stride,
    source_part_stride,
    source_slot_stride,
    source_scale_block_stride,
    source_scale_head_stride,
    source_scale_part_stride,
    target_block_stride,
    target_head_stride,
    target_part_stride,
    target_slot_stride,
    target_scale_block_stride,
    target_scale_head_stride,
    target_scale_part_stride,
    block_size,
    head_dim,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SOURCE_FORMAT: tl.constexpr,
    TARGET_FORMAT: tl.constexpr,
    SOURCE_HAS_SCALES: tl.constexpr,
    TARGET_HAS_SCALES: tl.constexpr,
):
    """One block's K or V of one head: `[block_size, head_dim]`."""
    pair, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source_block, target_block = tl.load(source_ids_ptr + pair), tl.load(target_ids_ptr + pair)
    slot, element = tl.arange(0, BLOCK_SLOTS), tl.arange(0, BLOCK_DIM)
    is_slot = slot < block_size
    mask = is_slot[:, None] & (element < head_dim)[None, :]
    source = source_ptr + source_block * source_block_stride + head * source_head_stride
    source += part * source_part_stride
    place = slot[:, None] * source_slot_stride + element[None, :]
    elements = tl.load(source + place, mask=mask, other=0)
    numbers = as_type(decode(elements, SOURCE_FORMAT), tl.float32)
    if SOURCE_HAS_SCALES:
        scales = source_scales_ptr + source_block * source_scale_block_stride
        scales += head * source_scale_head_stride + part * source_scale_part_stride
        numbers *= tl.load(scales + slot, mask=is_slot, other=0.0)[:, None]
    if TARGET_HAS_SCALES:
        scale = head_scales(numbers, TARGET_FORMAT)
        scales = target_scales_ptr + target_block * target_scale_block_stride
        scales += head * target_scale_head_stride + part * target_scale_part_stride
        tl.store(scales + slot, scale, mask=is_slot)
        numbers = tl.div_rn(numbers, scale[:, None])
    target = target_ptr + target_block * target_block_stride + head * target_head_stride
    target += part * target_part_stride
    place = slot[:, None] * target_slot_stride + element[None, :]
    converted = encode(numbers, TARGET_FORMAT, target_ptr.dtype.element_ty)
    tl.store(target + place, converted, mask=mask)


def convert_kv(
    source: KVView,
    source_blocks: Sequence[int],
    destination: KVView,
    destination_blocks: Sequence[int],
) -> None:
    """See `kernels.ops.convert_kv`."""
    assert source.values.shape[1:] == destination.values.shape[1:], "blocks of one shape"
    assert len(source_blocks) == len(destination_blocks), "a destination for each source"
    device = source.values.device
    source_ids = torch.tensor(source_blocks, dtype=torch.int64, device=device)
    target_ids = torch.tensor(destination_blocks, dtype=torch.int64, device=device)
    (source_values, source_format), (target_values, target_format) = (
        readable(source),
        writable(destination),
    )
    launch(
        _convert_kernel,
        (len(source_blocks), source.num_kv_heads, 2),
        source_values,
        source_values
        if source.scales is None
        else source.scales,  # never read where there are none
        target_values,
        target_values if destination.scales is None else destination.scales,  # likewise
        source_ids,
        target_ids,
        *source_values.stride()[:4],
        *_scale_strides(source.scales),
        *target_values.stride()[:4],
        *_scale_strides(destination.scales),
        source.block_size,
        source.head_dim,
        BLOCK_SLOTS=triton.next_power_of_2(source.block_size),
        BLOCK_DIM=triton.next_power_of_2(source.head_dim),
        SOURCE_FORMAT=source_format,
        TARGET_FORMAT=target_format,
        SOURCE_HAS_SCALES=source.scales is not None,
        TARGET_HAS_SCALES=destination.scales is not None,
        num_warps=row_warps(source.block_size * source.head_dim),
    )


def _scale_strides(scales: Tensor | None) -> tuple[int, ...]:
    """Of block, head and part."""
    return (0, 0, 0) if scales is None else scales.stride()[:3]
