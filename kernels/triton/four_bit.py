"""Products with four-bit weights in planes (`kernels.triton.planes`).

Quants are whole numbers that every float type holds, so a chunk's product is exact before its scale: each chunk is
multiplied by its scales after the product, in float32, and offsets by the sum of the chunk's inputs.

Few rows leave most of a card idle where one program walks all columns of its outputs. Their kernel cuts the columns
into slices that the warps of one program walk side by side, and adds the slices up at the end, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.numerics import as_type, dot, store_tile
from kernels.triton.planes import Planes
from kernels.triton.tuning import product_tile


@triton.jit
def _fold_chunk(
    total,
    zero,
    inputs,
    quants,
    scales_ptr,
    offsets_ptr,
    place,
    group_step,
    is_row,
    is_output,
    AXIS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """total plus one chunk's part of the product.

    inputs, quants: pointers to the low half's `[rows, HALF]` and the bytes' `[HALF, outputs]`, perhaps a slice each.
    place: of the chunk's first group among scales and offsets; the next group lies group_step behind it.
    AXIS: the last axis of the inputs.
    """
    dtype: tl.constexpr = inputs.dtype.element_ty
    packed = tl.load(quants, mask=is_output, other=0)
    low = as_type((packed & 15).to(tl.int8) - MIDDLE, dtype)
    high = as_type((packed >> 4).to(tl.int8) - MIDDLE, dtype)
    low_inputs = tl.load(inputs, mask=is_row, other=0.0)
    high_inputs = tl.load(inputs + HALF, mask=is_row, other=0.0)
    scale = tl.load(scales_ptr + place, mask=is_output, other=0.0).to(tl.float32)
    product = dot(low_inputs, low, zero)
    if GROUP >= 2 * HALF:  # both halves share a scale
        total += dot(high_inputs, high, product) * scale
    else:
        total += product * scale
        scale = tl.load(scales_ptr + place + group_step, mask=is_output, other=0.0)
        total += dot(high_inputs, high, zero) * scale.to(tl.float32)
    if HAS_OFFSETS:
        low_sum = tl.sum(low_inputs.to(tl.float32), axis=AXIS, keep_dims=True)
        high_sum = tl.sum(high_inputs.to(tl.float32), axis=AXIS, keep_dims=True)
        offset = tl.load(offsets_ptr + place, mask=is_output, other=0.0).to(tl.float32)
        if GROUP >= 2 * HALF:
            total += (low_sum + high_sum) * offset
        else:
            total += low_sum * offset
            offset = tl.load(offsets_ptr + place + group_step, mask=is_output, other=0.0)
            total += high_sum * offset.to(tl.float32)
    return total


@triton.jit
def _many_rows_kernel(
    inputs_ptr,
    quants_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    num_chunks,
    input_stride,
    output_stride,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """output = inputs @ weight^T + bias, one tile of it; one chain over the chunks, in order."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    output = (tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS))[None, :]
    is_row, is_output = row < num_rows, output < num_outputs
    column = tl.arange(0, HALF)
    inputs = inputs_ptr + row.to(tl.int64) * input_stride + column[None, :]
    quants = quants_ptr + output * HALF + column[:, None]
    zero = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    total = zero
    for chunk in range(num_chunks):
        place = chunk * 2 * HALF // GROUP * num_outputs + output
        total = _fold_chunk(
            total,
            zero,
            inputs,
            quants,
            scales_ptr,
            offsets_ptr,
            place,
            num_outputs,
            is_row,
            is_output,
            1,
            GROUP,
            HALF,
            MIDDLE,
            HAS_OFFSETS,
        )
        inputs += 2 * HALF
        quants += num_outputs * HALF
    store_tile(total, bias_ptr, output_ptr, row, output, is_row, is_output, output_stride, HAS_BIAS)


@triton.jit
def _few_rows_kernel(
    inputs_ptr,
    quants_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    num_chunks,
    input_stride,
    output_stride,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr,
):
    """The same for one tile of rows; slice s walks chunks `[s * length, (s + 1) * length)`."""
    row = tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    length = tl.cdiv(num_chunks, SLICES)
    first = tl.arange(0, SLICES)[:, None, None] * length
    column = tl.arange(0, HALF)
    inputs = inputs_ptr + (row.to(tl.int64) * input_stride)[None, :, None] + column[None, None, :]
    quants = quants_ptr + output[None, None, :] * HALF + column[None, :, None]
    zero = tl.zeros([SLICES, BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    total = zero
    for step in range(length):
        chunk = first + step
        is_chunk = chunk < num_chunks
        place = chunk * 2 * HALF // GROUP * num_outputs + output[None, None, :]
        total = _fold_chunk(
            total,
            zero,
            inputs + chunk * (2 * HALF),
            quants + chunk.to(tl.int64) * num_outputs * HALF,
            scales_ptr,
            offsets_ptr,
            place,
            num_outputs,
            is_row[None, :, None] & is_chunk,
            is_output[None, None, :] & is_chunk,
            2,
            GROUP,
            HALF,
            MIDDLE,
            HAS_OFFSETS,
        )
    total = tl.sum(total, axis=0)
    row, output = row[:, None], output[None, :]
    is_row, is_output = is_row[:, None], is_output[None, :]
    store_tile(total, bias_ptr, output_ptr, row, output, is_row, is_output, output_stride, HAS_BIAS)


def four_bit_linear(inputs: Tensor, planes: Planes, bias: Tensor | None, output: Tensor) -> None:
    """Write `inputs @ weight^T + bias` into `output [T, N]`, whose rows may lie apart."""
    num_rows = inputs.shape[0]
    num_chunks, num_outputs, half = planes.quants.shape
    tile = product_tile("four_bit", inputs.dtype, num_rows)
    slices: dict[str, Any] = {"SLICES": tile.num_slices} if tile.num_slices > 1 else {}
    launch(
        _few_rows_kernel if slices else _many_rows_kernel,
        (triton.cdiv(num_rows, tile.block_rows), triton.cdiv(num_outputs, tile.block_outputs)),
        inputs,
        planes.quants,
        planes.scales,
        planes.scales
        if planes.offsets is None
        else planes.offsets,  # never read where there are none
        planes.scales if bias is None else bias,  # likewise
        output,
        num_rows,
        num_outputs,
        num_chunks,
        inputs.stride(0),
        output.stride(0),
        GROUP=planes.group_size,
        HALF=half,
        MIDDLE=planes.middle,
        HAS_OFFSETS=planes.offsets is not None,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=tile.block_rows,
        BLOCK_OUTPUTS=tile.block_outputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **slices,
    )
