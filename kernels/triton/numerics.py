"""Arithmetic that several kernels share, for use inside kernels only.

Three things differ between a card and the interpreter, and only here: the interpreter multiplies bfloat16 as the raw
bit patterns they are stored in, so products widen their operands first; its products are numpy's, which give a row
other bits in another place of a tile, so rows are multiplied one by one; and it truncates to bfloat16, so narrowing
rounds by hand. Compiled code contains none of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_ROUNDING = tl.constexpr(
    12582912.0
)  # 1.5 * 2**23: adding it leaves no room for a fraction in float32


@triton.jit
def dot(left, right, total):
    """`total + left @ right`, the sum in float32; float32 operands are not narrowed to TF32."""
    if _INTERPRETED:
        result = _dot_by_rows(left.to(tl.float32), right.to(tl.float32), total)
    else:
        result = tl.dot(left, right, total, input_precision="ieee")
    return result


@triton.jit
def _dot_by_rows(left, right, total):
    """`dot` of float32 as a product for each row, [.., M, K] and [.., K, N]."""
    batch: tl.constexpr = left.shape[0] if len(left.shape) == 3 else 1
    rows: tl.constexpr = left.shape[-2]
    width: tl.constexpr = left.shape[-1]
    columns: tl.constexpr = right.shape[-1]
    each = tl.reshape(right, [batch, 1, width, columns])
    each = tl.broadcast_to(each, [batch, rows, width, columns])
    product = tl.dot(
        tl.reshape(left, [batch * rows, 1, width]),
        tl.reshape(each, [batch * rows, width, columns]),
        tl.reshape(total, [batch * rows, 1, columns]),
        input_precision="ieee",
    )
    return tl.reshape(product, total.shape)


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """float32 to `dtype`, rounded to nearest even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        rounded = tl.where(values == values, rounded, 0x7FC0)
        result = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = values.to(dtype)
    return result


@triton.jit
def as_type(numbers, dtype: tl.constexpr):
    """Numbers of any type as `dtype`, rounded to nearest even, untouched where they have it."""
    if numbers.dtype == dtype:
        result = numbers
    elif _INTERPRETED:
        result = narrow(numbers.to(tl.float32), dtype)
    else:
        result = numbers.to(dtype)
    return result


@triton.jit
def round_even(values):
    """The nearest whole number of float32 values below 2**22 in magnitude, the even one of two."""
    return (values + _ROUNDING) - _ROUNDING


@triton.jit
def tanh(values):
    """Hyperbolic tangent, by the exponential; an infinite one gives 1 exactly."""
    return 1.0 - 2.0 / (tl.exp(2.0 * values) + 1.0)


@triton.jit
def store_tile(
    total, bias_ptr, output_ptr, row, output, is_row, is_output, stride, HAS_BIAS: tl.constexpr
):
    """A product's tile `[rows, outputs]` into an output whose rows lie `stride` apart, bias added."""
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
    target = output_ptr + row.to(tl.int64) * stride + output
    tl.store(target, narrow(total, output_ptr.dtype.element_ty), mask=is_row & is_output)
