"""Products with four-bit weights in planes (`kernels.triton.planes`).

Quants are whole numbers that every float type holds, so a chunk's product is exact before its scale: each chunk is
multiplied by its scales after the product, in float32, and offsets by the sum of the chunk's inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.numerics import as_type, dot, narrow
from kernels.triton.planes import Planes
from kernels.triton.tuning import product_tile


@triton.jit
def _scaled(
    product,
    inputs,
    total,
    scales_ptr,
    offsets_ptr,
    place,
    is_output,
    HAS_OFFSETS: tl.constexpr,
):
    """total + product * scale + sum(inputs) * offset."""
    scale = tl.load(scales_ptr + place, mask=is_output, other=0.0).to(tl.float32)
    total += product * scale[None, :]
    if HAS_OFFSETS:
        offset = tl.load(offsets_ptr + place, mask=is_output, other=0.0).to(tl.float32)
        total += tl.sum(inputs.to(tl.float32), axis=1)[:, None] * offset[None, :]
    return total


@triton.jit
def _four_bit_kernel(
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
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    column = tl.arange(0, HALF)
    inputs = inputs_ptr + row.to(tl.int64)[:, None] * input_stride + column[None, :]
    quants = quants_ptr + output.to(tl.int64)[:, None] * HALF + column[None, :]
    dtype: tl.constexpr = inputs_ptr.dtype.element_ty
    zero = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    total = zero
    for chunk in range(num_chunks):
        packed = tl.load(quants, mask=is_output[:, None], other=0)
        low = as_type((packed & 15).to(tl.int8) - MIDDLE, dtype)
        high = as_type((packed >> 4).to(tl.int8) - MIDDLE, dtype)
        low_inputs = tl.load(inputs, mask=is_row[:, None], other=0.0)
        high_inputs = tl.load(inputs + HALF, mask=is_row[:, None], other=0.0)
        place = chunk * 2 * HALF // GROUP * num_outputs + output
        product = dot(low_inputs, tl.trans(low), zero)
        if GROUP >= 2 * HALF:
            product = dot(high_inputs, tl.trans(high), product)
            both = low_inputs.to(tl.float32) + high_inputs.to(tl.float32)
            total = _scaled(
                product, both, total, scales_ptr, offsets_ptr, place, is_output, HAS_OFFSETS
            )
        else:
            total = _scaled(
                product, low_inputs, total, scales_ptr, offsets_ptr, place, is_output, HAS_OFFSETS
            )
            product = dot(high_inputs, tl.trans(high), zero)
            place += num_outputs
            total = _scaled(
                product, high_inputs, total, scales_ptr, offsets_ptr, place, is_output, HAS_OFFSETS
            )
        inputs += 2 * HALF
        quants += num_outputs * HALF
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    target = output_ptr + row.to(tl.int64)[:, None] * output_stride + output[None, :]
    tl.store(
        target,
        narrow(total, output_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def four_bit_linear(inputs: Tensor, planes: Planes, bias: Tensor | None, output: Tensor) -> None:
    """Write `inputs @ weight^T + bias` into `output [T, N]`, whose rows may lie apart."""
    num_rows = inputs.shape[0]
    num_chunks, num_outputs, half = planes.quants.shape
    tile = product_tile("four_bit", inputs.dtype, num_rows)
    launch(
        _four_bit_kernel,
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
    )
