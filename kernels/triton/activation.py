"""Gated activations: a flat pass over rows cut into pieces, one program a piece."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.numerics import narrow, tanh
from kernels.triton.tuning import ELEMENTWISE_BLOCK

_GELU_FACTOR = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _gated_kernel(
    gate_up_ptr,
    output_ptr,
    row_stride,
    num_columns,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output = f(gate) * up; f(gate) is rounded to the output's type first, as the reference rounds."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    source = gate_up_ptr + row * row_stride + column
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + num_columns, mask=is_column, other=0.0).to(tl.float32)
    if IS_GELU:
        inner = _GELU_FACTOR * (gate + _GELU_CUBIC * gate * gate * gate)
        active = 0.5 * gate * (1.0 + tanh(inner))
    else:
        active = gate / (1.0 + tl.exp(-gate))
    dtype = output_ptr.dtype.element_ty
    result = narrow(narrow(active, dtype).to(tl.float32) * up, dtype)
    tl.store(output_ptr + row * num_columns + column, result, mask=is_column)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.ops.silu_mul`."""
    return _gated(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.ops.gelu_mul`."""
    return _gated(gate_up, is_gelu=True)


def _gated(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(-1) == 1, "rows are contiguous"
    output = gate_up.new_empty(num_rows, num_columns)
    block = min(ELEMENTWISE_BLOCK, triton.next_power_of_2(num_columns))
    launch(
        _gated_kernel,
        (num_rows, triton.cdiv(num_columns, block)),
        gate_up,
        output,
        gate_up.stride(0),
        num_columns,
        IS_GELU=is_gelu,
        BLOCK=block,
        num_warps=4,
    )
    return output
