"""RMSNorm, alone and after a residual sum: one program a row, the mean square in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.numerics import narrow
from kernels.triton.tuning import row_warps


@triton.jit
def _normalise(row, weight_ptr, column, is_column, epsilon, num_columns, dtype: tl.constexpr):
    """`row / rms(row)` rounded to dtype, times the weight, rounded again: as the reference rounds."""
    inverse = tl.rsqrt(tl.sum(row * row) / num_columns + epsilon)
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    normed = narrow(row * inverse, dtype).to(tl.float32)
    return narrow(normed * weight, dtype)


@triton.jit
def _rms_norm_kernel(
    hidden_ptr,
    weight_ptr,
    output_ptr,
    outer_stride,
    inner_stride,
    num_inner,
    num_columns,
    epsilon,
    BLOCK: tl.constexpr,
):
    """output[o, i, :] = hidden[o, i, :] / rms * weight, for rows of two leading dimensions."""
    number = tl.program_id(0)
    outer, inner = number // num_inner, number % num_inner
    start = outer.to(tl.int64) * outer_stride + inner * inner_stride
    column = tl.arange(0, BLOCK)
    is_column = column < num_columns
    row = tl.load(hidden_ptr + start + column, mask=is_column, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    normed = _normalise(row, weight_ptr, column, is_column, epsilon, num_columns, dtype)
    tl.store(output_ptr + number.to(tl.int64) * num_columns + column, normed, mask=is_column)


@triton.jit
def _add_rms_norm_kernel(
    hidden_ptr,
    residual_ptr,
    weight_ptr,
    output_ptr,
    hidden_stride,
    residual_stride,
    num_columns,
    epsilon,
    BLOCK: tl.constexpr,
):
    """residual += hidden, in place; output = residual / rms * weight."""
    number = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < num_columns
    hidden = tl.load(hidden_ptr + number * hidden_stride + column, mask=is_column, other=0.0)
    residual_ptrs = residual_ptr + number * residual_stride + column
    residual = tl.load(residual_ptrs, mask=is_column, other=0.0)
    dtype = output_ptr.dtype.element_ty
    total = narrow(residual.to(tl.float32) + hidden.to(tl.float32), dtype)
    tl.store(residual_ptrs, total, mask=is_column)
    row = total.to(tl.float32)
    normed = _normalise(row, weight_ptr, column, is_column, epsilon, num_columns, dtype)
    tl.store(output_ptr + number * num_columns + column, normed, mask=is_column)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See `kernels.ops.rms_norm`. hidden: `[T, H]` or `[T, heads, D]`, the last dimension contiguous."""
    assert hidden.dim() in (2, 3), "rows of one or two leading dimensions"
    assert hidden.stride(-1) == 1, "rows are contiguous"
    num_columns = hidden.shape[-1]
    num_inner = hidden.shape[1] if hidden.dim() == 3 else 1
    inner_stride = hidden.stride(1) if hidden.dim() == 3 else 0
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    launch(
        _rms_norm_kernel,
        (hidden.shape[0] * num_inner,),
        hidden,
        weight,
        output,
        hidden.stride(0),
        inner_stride,
        num_inner,
        num_columns,
        epsilon,
        BLOCK=triton.next_power_of_2(num_columns),
        num_warps=row_warps(num_columns),
    )
    return output


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.add_rms_norm`. The sum takes the memory of `residual`."""
    assert hidden.stride(-1) == 1 == residual.stride(-1), "rows are contiguous"
    num_columns = hidden.shape[-1]
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    launch(
        _add_rms_norm_kernel,
        (hidden.shape[0],),
        hidden,
        residual,
        weight,
        output,
        hidden.stride(0),
        residual.stride(0),
        num_columns,
        epsilon,
        BLOCK=triton.next_power_of_2(num_columns),
        num_warps=row_warps(num_columns),
    )
    return output, residual
