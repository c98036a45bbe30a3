"""What a slot of the pool holds, for use inside kernels: elements to numbers and back, as in kernels.reference.

fp8 elements are loaded as the bytes they are, and decoded by shifts where the card cannot convert them, so that every
format works on every card; they are always encoded by shifts, which gives the reference's bits. Formats travel as
the constexpr FORMAT: `number` (the pool's own float type), `int8`, `e4m3`, `e5m2`, and `e4m3 card` where the hardware
converts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_view import KVView
from kernels.triton.launch import current_card
from kernels.triton.numerics import narrow, round_even

_LEAST_SCALE = tl.constexpr(1e-6)
_LARGEST_E4M3 = tl.constexpr(448.0)
_LARGEST_E5M2 = tl.constexpr(57344.0)
_LARGEST_INT8 = tl.constexpr(127.0)
_BYTE_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def readable(layer: KVView) -> tuple[Tensor, str]:
    """The values as a kernel reads them, and their FORMAT."""
    values, kv_format = writable(layer)
    can_convert = kv_format == "e4m3" and current_card().has_fp8
    return values, "e4m3 card" if can_convert else kv_format


def writable(layer: KVView) -> tuple[Tensor, str]:
    """The values as a kernel writes them, and their FORMAT."""
    values = layer.values
    if values.dtype in _BYTE_FORMATS:
        return values.view(torch.uint8), _BYTE_FORMATS[values.dtype]
    return values, "int8" if values.dtype == torch.int8 else "number"


@triton.jit
def decode(elements, FORMAT: tl.constexpr):
    """Elements of a pool as numbers of some type that holds them exactly, for `as_type`; scales are not applied."""
    if FORMAT == "e4m3 card":
        numbers = elements.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == "e4m3":
        # The same bits one place lower in a float16 are the number divided by 256, subnormals included.
        wide = elements.to(tl.uint16)
        shifted = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = shifted.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        numbers = tl.where((wide & 0x7F) == 0x7F, float("nan"), numbers)
    elif FORMAT == "e5m2":
        numbers = (elements.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        numbers = elements
    return numbers


@triton.jit
def _encode_fp8(numbers, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 within the format's range to its byte, rounded to nearest even."""
    bits = numbers.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - MANTISSA
    rounded = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
    normal = rounded.to(tl.int32) - ((127 - BIAS) << MANTISSA)
    # Below the least normal number all have the same distance: 2 ** (1 - BIAS - MANTISSA).
    steps: tl.constexpr = float(1 << (BIAS + MANTISSA - 1))
    subnormal = round_even(tl.abs(numbers) * steps).to(tl.int32)
    code = tl.where(normal < (1 << MANTISSA), subnormal, normal)
    code = tl.where(numbers != numbers, 0x7F, code)
    return (code | (bits >> 24).to(tl.int32) & 0x80).to(tl.uint8)


@triton.jit
def encode(numbers, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """float32 numbers as elements of a pool; a scale was divided out before."""
    if FORMAT == "e4m3":
        clamped = tl.minimum(tl.maximum(numbers, -_LARGEST_E4M3), _LARGEST_E4M3)
        elements = _encode_fp8(tl.where(numbers != numbers, numbers, clamped), 3, 7)
    elif FORMAT == "e5m2":
        clamped = tl.minimum(tl.maximum(numbers, -_LARGEST_E5M2), _LARGEST_E5M2)
        elements = _encode_fp8(tl.where(numbers != numbers, numbers, clamped), 2, 15)
    elif FORMAT == "int8":
        clamped = tl.minimum(tl.maximum(numbers, -_LARGEST_INT8), _LARGEST_INT8)
        elements = round_even(clamped).to(tl.int8)
    else:
        elements = narrow(numbers, dtype)
    return elements


@triton.jit
def head_scales(numbers, FORMAT: tl.constexpr):
    """The scale of each head `[heads]` of float32 numbers `[heads, D]`, zeros behind the last element."""
    if FORMAT == "int8":
        largest = _LARGEST_INT8
    elif FORMAT == "e4m3":
        largest = _LARGEST_E4M3
    else:
        largest = _LARGEST_E5M2
    return tl.maximum(tl.div_rn(tl.max(tl.abs(numbers), axis=1), largest), _LEAST_SCALE)
