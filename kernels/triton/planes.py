"""Quantised weights in planes: what `pack` makes of them, and what the products of this backend read.

A weight is cut into chunks of columns; a chunk's quants of all rows lie together, so that a tile of outputs is one
run of bytes. Scales and offsets are `[groups, num_rows]`: an element is `quant * scale + offset`.

Four bits: a chunk is two halves of HALF columns; byte j of a row's chunk holds column j in its low and column
HALF + j in its high half, plus `middle`. Eight bits: byte j is column j, signed. Formats of two and three bits take
four here, of five and six bits eight: memory for speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.gguf_quants import quant, scale_and_least
from kernels.triton.launch import launch
from kernels.triton.tuning import LARGEST_HALF
from kernels.weights import BlockWeight, GroupWeight

_LEAST_HALF = 16  # the smallest side of a product


class PlaneFormat(NamedTuple):
    """How a GGUF format lies in planes. middle: what is added to a quant of four bits to make it positive."""

    bits: int
    group_size: int
    middle: int
    has_offsets: bool


PLANE_FORMATS = {
    "Q4_0": PlaneFormat(4, 32, 8, False),
    "Q4_1": PlaneFormat(4, 32, 0, True),
    "Q5_0": PlaneFormat(8, 32, 0, False),
    "Q5_1": PlaneFormat(8, 32, 0, True),
    "Q8_0": PlaneFormat(8, 32, 0, False),
    "Q2_K": PlaneFormat(4, 16, 0, True),
    "Q3_K": PlaneFormat(4, 16, 4, False),
    "Q4_K": PlaneFormat(4, 32, 0, True),
    "Q5_K": PlaneFormat(8, 32, 0, True),
    "Q6_K": PlaneFormat(8, 16, 0, False),
}


@dataclass(frozen=True, slots=True)
class Planes:
    """A weight in planes.

    quants: `[chunks, num_rows, bytes of a row's chunk]`, uint8 of two quants or int8.
    scales: `[groups, num_rows]`. offsets: likewise, or None where they are 0.
    bits: of a quant, 4 or 8. group_size: columns that share a scale. middle: the four-bit quant that stands for 0.
    """

    quants: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    group_size: int
    middle: int

    @property
    def num_rows(self) -> int:
        """Rows of the weight: outputs of a product."""
        return self.quants.shape[1]

    @property
    def num_columns(self) -> int:
        """Columns of the weight: inputs of a product."""
        return self.quants.shape[0] * self.quants.shape[2] * 8 // self.bits


@triton.jit
def _plane_kernel(
    raw_ptr,
    quants_ptr,
    scales_ptr,
    offsets_ptr,
    raw_stride,
    num_rows,
    FORMAT: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    IS_FOUR_BIT: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One chunk of CHUNK columns of BLOCK_ROWS rows from blocks to planes."""
    chunk = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    is_row = row < num_rows
    first = chunk * CHUNK
    start = raw_ptr + tl.minimum(row, num_rows - 1).to(tl.int64) * raw_stride
    block = start + first // BLOCK_ELEMENTS * BLOCK_BYTES
    index = first % BLOCK_ELEMENTS
    place = chunk.to(tl.int64) * num_rows + row
    if IS_FOUR_BIT:
        half: tl.constexpr = CHUNK // 2
        column = tl.arange(0, half)[None, :]
        low = quant(block, index + column, FORMAT) + MIDDLE
        high = quant(block, index + half + column, FORMAT) + MIDDLE
        tl.store(quants_ptr + place * half + column, (low | (high << 4)).to(tl.uint8), mask=is_row)
    else:
        column = tl.arange(0, CHUNK)[None, :]
        whole = quant(block, index + column, FORMAT).to(tl.int8)
        tl.store(quants_ptr + place * CHUNK + column, whole, mask=is_row)
    group = tl.arange(0, CHUNK // GROUP)[None, :]
    scale, least = scale_and_least(block + group * 0, index + group * GROUP + row * 0, FORMAT)
    place = (chunk * (CHUNK // GROUP) + group).to(tl.int64) * num_rows + row
    tl.store(scales_ptr + place, scale.to(scales_ptr.dtype.element_ty), mask=is_row)
    if HAS_OFFSETS:
        tl.store(offsets_ptr + place, least.to(offsets_ptr.dtype.element_ty), mask=is_row)


def blocks_to_planes(weight: BlockWeight) -> Planes:
    """GGUF blocks in planes. Scales keep the float32 they are computed in where the weight expands to float32, and
    are rounded to float16 where it expands to half precision anyway."""
    name, (num_rows, num_columns) = weight.block_format.name, weight.shape
    plane = PLANE_FORMATS[name]
    chunk = max(plane.group_size, 2 * _LEAST_HALF if plane.bits == 4 else 0)
    device, scale_dtype = weight.raw.device, torch.float16
    if weight.dtype == torch.float32:
        scale_dtype = torch.float32
    quants = torch.empty(
        (num_columns // chunk, num_rows, chunk * plane.bits // 8),
        dtype=torch.uint8 if plane.bits == 4 else torch.int8,
        device=device,
    )
    scales = torch.empty(
        num_columns // plane.group_size, num_rows, dtype=scale_dtype, device=device
    )
    offsets = torch.empty_like(scales) if plane.has_offsets else None
    block_rows = 32
    launch(
        _plane_kernel,
        (num_columns // chunk, triton.cdiv(num_rows, block_rows)),
        weight.raw,
        quants,
        scales,
        scales if offsets is None else offsets,  # never written where there are none
        weight.raw.stride(0),
        num_rows,
        FORMAT=name,
        BLOCK_ELEMENTS=weight.block_format.block_elements,
        BLOCK_BYTES=weight.block_format.block_bytes,
        GROUP=plane.group_size,
        MIDDLE=plane.middle,
        IS_FOUR_BIT=plane.bits == 4,
        HAS_OFFSETS=plane.has_offsets,
        CHUNK=chunk,
        BLOCK_ROWS=block_rows,
        num_warps=4,
    )
    return Planes(quants, scales, offsets, plane.bits, plane.group_size, plane.middle)


def half_of_chunk(group_size: int, num_columns: int) -> int:
    """Columns of half a chunk of four-bit quants: a power of two that cuts groups and columns evenly; 0 if none."""
    half = LARGEST_HALF
    while half >= _LEAST_HALF:
        is_even = group_size % (2 * half) == 0 or group_size == half
        if is_even and num_columns % (2 * half) == 0:
            return half
        half //= 2
    return 0


def groups_to_planes(weight: GroupWeight) -> Planes | None:
    """Four-bit groups in planes; None where groups are too small or uneven for it."""
    num_rows, num_columns = weight.shape
    half = half_of_chunk(weight.group_size, num_columns)
    if half == 0:
        return None
    quants = torch.stack((weight.packed & 15, weight.packed >> 4), dim=-1)
    halves = quants.view(num_rows, -1, 2, half)  # [num_rows, chunks, 2, half]
    packed = (halves[:, :, 0] | (halves[:, :, 1] << 4)).transpose(0, 1).contiguous()
    scales = weight.scales.t().contiguous()  # [groups, num_rows]
    offsets = None if weight.zeros is None else -(weight.zeros * weight.scales).t().contiguous()
    middle = 8 if weight.zeros is None else 0
    return Planes(packed, scales, offsets, 4, weight.group_size, middle)
