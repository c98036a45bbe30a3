"""Products with eight-bit weights: in planes with a scale a group (`kernels.triton.planes`), or with one a row.

Quants are whole numbers that every float type holds, so a product is exact before its scale, which is applied in
float32: after each chunk of a plane, or once at the end where a row has one scale. Few rows have a kernel that cuts
the columns into slices, as in `kernels.triton.four_bit`.
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
from kernels.weights import ChannelWeight


@triton.jit
def _fold_chunk(
    total,
    zero,
    inputs,
    quants,
    scales_ptr,
    offsets_ptr,
    place,
    is_input,
    is_quant,
    is_output,
    AXIS: tl.constexpr,
    IS_PLANAR: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """total plus one chunk's part of the product.

    inputs, quants: pointers to `[rows, CHUNK]` and `[CHUNK, outputs]`, perhaps a slice each; the masks likewise.
    place: of the chunk's group among scales and offsets. AXIS: the last axis of the inputs.
    """
    numbers = tl.load(inputs, mask=is_input, other=0.0)
    weights = as_type(tl.load(quants, mask=is_quant, other=0), inputs.dtype.element_ty)
    if IS_PLANAR:
        scale = tl.load(scales_ptr + place, mask=is_output, other=0.0).to(tl.float32)
        total += dot(numbers, weights, zero) * scale
        if HAS_OFFSETS:
            offset = tl.load(offsets_ptr + place, mask=is_output, other=0.0).to(tl.float32)
            total += tl.sum(numbers.to(tl.float32), axis=AXIS, keep_dims=True) * offset
    else:
        total = dot(numbers, weights, total)
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
    num_columns,
    input_stride,
    output_stride,
    quant_row_stride,
    quant_chunk_stride,
    IS_PLANAR: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """output = inputs @ weight^T + bias, one tile of it; one chain over the chunks of columns, in order."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    output = (tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS))[None, :]
    is_row, is_output = row < num_rows, output < num_outputs
    column = tl.arange(0, CHUNK)
    inputs = inputs_ptr + row.to(tl.int64) * input_stride + column[None, :]
    quants = quants_ptr + output.to(tl.int64) * quant_row_stride + column[:, None]
    zero = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    total = zero
    for first in range(0, num_columns, CHUNK):
        is_column = first + column < num_columns
        total = _fold_chunk(
            total,
            zero,
            inputs,
            quants,
            scales_ptr,
            offsets_ptr,
            first // CHUNK * num_outputs + output,
            is_row & is_column[None, :],
            is_output & is_column[:, None],
            is_output,
            1,
            IS_PLANAR,
            HAS_OFFSETS,
        )
        inputs += CHUNK
        quants += quant_chunk_stride
    if not IS_PLANAR:
        total *= tl.load(scales_ptr + output, mask=is_output, other=0.0)
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
    num_columns,
    input_stride,
    output_stride,
    quant_row_stride,
    quant_chunk_stride,
    IS_PLANAR: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SLICES: tl.constexpr,
):
    """The same for one tile of rows; slice s walks chunks `[s * length, (s + 1) * length)`."""
    row = tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    length = tl.cdiv(tl.cdiv(num_columns, CHUNK), SLICES)
    first = tl.arange(0, SLICES)[:, None, None] * length
    column = tl.arange(0, CHUNK)
    rows = inputs_ptr + (row.to(tl.int64) * input_stride)[None, :, None]
    outputs = quants_ptr + (output.to(tl.int64) * quant_row_stride)[None, None, :]
    zero = tl.zeros([SLICES, BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    total = zero
    for step in range(length):
        chunk = first + step
        row_column = chunk * CHUNK + column[None, None, :]
        is_column = chunk * CHUNK + column[None, :, None] < num_columns
        total = _fold_chunk(
            total,
            zero,
            rows + row_column,
            outputs + chunk.to(tl.int64) * quant_chunk_stride + column[None, :, None],
            scales_ptr,
            offsets_ptr,
            chunk * num_outputs + output[None, None, :],
            is_row[None, :, None] & (row_column < num_columns),
            is_output[None, None, :] & is_column,
            is_output[None, None, :] & (chunk * CHUNK < num_columns),
            2,
            IS_PLANAR,
            HAS_OFFSETS,
        )
    merged = tl.sum(total, axis=0)
    row, output = row[:, None], output[None, :]
    is_row, is_output = is_row[:, None], is_output[None, :]
    if not IS_PLANAR:
        merged *= tl.load(scales_ptr + output, mask=is_output, other=0.0)
    store_tile(
        merged, bias_ptr, output_ptr, row, output, is_row, is_output, output_stride, HAS_BIAS
    )


def eight_bit_linear(
    inputs: Tensor, weight: Planes | ChannelWeight, bias: Tensor | None, output: Tensor
) -> None:
    """Write `inputs @ weight^T + bias` into `output [T, N]`, whose rows may lie apart."""
    num_rows, num_columns = inputs.shape
    num_outputs = output.shape[1]
    tile = product_tile("eight_bit", inputs.dtype, num_rows)
    if isinstance(weight, Planes):
        quants, offsets, chunk = weight.quants, weight.offsets, weight.group_size
        quant_strides = (chunk, num_outputs * chunk)
    else:
        quants, offsets, chunk = weight.values, None, tile.block_columns
        quant_strides = (quants.stride(0), chunk)
    slices: dict[str, Any] = {"SLICES": tile.num_slices} if tile.num_slices > 1 else {}
    launch(
        _few_rows_kernel if slices else _many_rows_kernel,
        (triton.cdiv(num_rows, tile.block_rows), triton.cdiv(num_outputs, tile.block_outputs)),
        inputs,
        quants,
        weight.scales,
        weight.scales if offsets is None else offsets,  # never read where there are none
        weight.scales if bias is None else bias,  # likewise
        output,
        num_rows,
        num_outputs,
        num_columns,
        inputs.stride(0),
        output.stride(0),
        *quant_strides,
        IS_PLANAR=isinstance(weight, Planes),
        HAS_OFFSETS=offsets is not None,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=tile.block_rows,
        BLOCK_OUTPUTS=tile.block_outputs,
        CHUNK=chunk,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **slices,
    )
