"""Products with eight-bit weights: in planes with a scale a group (`kernels.triton.planes`), or with one a row.

Quants are whole numbers that every float type holds, so a product is exact before its scale, which is applied in
float32: after each chunk of a plane, or once at the end where a row has one scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.numerics import as_type, dot, narrow
from kernels.triton.planes import Planes
from kernels.triton.tuning import product_tile
from kernels.weights import ChannelWeight


@triton.jit
def _eight_bit_kernel(
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
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    column = tl.arange(0, CHUNK)
    inputs = inputs_ptr + row.to(tl.int64)[:, None] * input_stride + column[None, :]
    quants = quants_ptr + output.to(tl.int64)[:, None] * quant_row_stride + column[None, :]
    dtype: tl.constexpr = inputs_ptr.dtype.element_ty
    zero = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    total = zero
    for first in range(0, num_columns, CHUNK):
        is_column = first + column < num_columns
        weights = tl.load(quants, mask=is_output[:, None] & is_column[None, :], other=0)
        numbers = tl.load(inputs, mask=is_row[:, None] & is_column[None, :], other=0.0)
        if IS_PLANAR:
            product = dot(numbers, tl.trans(as_type(weights, dtype)), zero)
            place = first // CHUNK * num_outputs + output
            scale = tl.load(scales_ptr + place, mask=is_output, other=0.0).to(tl.float32)
            total += product * scale[None, :]
            if HAS_OFFSETS:
                offset = tl.load(offsets_ptr + place, mask=is_output, other=0.0).to(tl.float32)
                total += tl.sum(numbers.to(tl.float32), axis=1)[:, None] * offset[None, :]
        else:
            total = dot(numbers, tl.trans(as_type(weights, dtype)), total)
        inputs += CHUNK
        quants += quant_chunk_stride
    if not IS_PLANAR:
        total *= tl.load(scales_ptr + output, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    target = output_ptr + row.to(tl.int64)[:, None] * output_stride + output[None, :]
    mask = is_row[:, None] & is_output[None, :]
    tl.store(target, narrow(total, output_ptr.dtype.element_ty), mask=mask)


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
    launch(
        _eight_bit_kernel,
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
    )
