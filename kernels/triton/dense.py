"""Products with plain weights.

On a card the vendor's library does them, through torch; where a row's bits must not depend on the number of rows,
which the library does not promise, this kernel does, with one tile size for every number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.numerics import dot, store_tile
from kernels.triton.tuning import product_tile


@triton.jit
def _dense_kernel(
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    num_columns,
    input_stride,
    output_stride,
    weight_row_stride,
    weight_column_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """output = inputs @ weight^T + bias, one tile of it; one chain over the columns, in order."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    column = tl.arange(0, BLOCK_COLUMNS)
    inputs = inputs_ptr + row.to(tl.int64)[:, None] * input_stride + column[None, :]
    weights = weight_ptr + output.to(tl.int64)[None, :] * weight_row_stride
    weights += column[:, None] * weight_column_stride
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    for first in range(0, num_columns, BLOCK_COLUMNS):
        is_column = first + column < num_columns
        left = tl.load(inputs, mask=is_row[:, None] & is_column[None, :], other=0.0)
        right = tl.load(weights, mask=is_column[:, None] & is_output[None, :], other=0.0)
        total = dot(left, right, total)
        inputs += BLOCK_COLUMNS
        weights += BLOCK_COLUMNS * weight_column_stride
    row, output = row[:, None], output[None, :]
    is_row, is_output = is_row[:, None], is_output[None, :]
    store_tile(total, bias_ptr, output_ptr, row, output, is_row, is_output, output_stride, HAS_BIAS)


def dense_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """Write `inputs @ weight^T + bias` into `output [T, N]`, whose rows may lie apart."""
    num_rows, (num_outputs, num_columns) = inputs.shape[0], weight.shape
    tile = product_tile("dense", inputs.dtype, num_rows)
    launch(
        _dense_kernel,
        (triton.cdiv(num_rows, tile.block_rows), triton.cdiv(num_outputs, tile.block_outputs)),
        inputs,
        weight,
        weight if bias is None else bias,  # never read where there is none
        output,
        num_rows,
        num_outputs,
        num_columns,
        inputs.stride(0),
        output.stride(0),
        *weight.stride(),
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=tile.block_rows,
        BLOCK_OUTPUTS=tile.block_outputs,
        BLOCK_COLUMNS=tile.block_columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
