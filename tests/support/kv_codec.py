"""What the bytes of a slot mean, in numpy: independent of the kernels, one number at a time where it matters.

`encode` rounds by searching a table of every value that a format has; `decode` looks the bytes up in it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.kv_view import KVView

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.floating[Any]]

FP8 = {
    "fp8_e4m3": (4, 3, True),
    "fp8_e5m2": (5, 2, False),
    "fp8_per_token_head": (4, 3, True),
}
"""Bits of exponent and mantissa, and whether the highest exponent holds numbers too."""

LARGEST = {
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    "fp8_per_token_head": 448.0,
    "int8_per_token_head": 127.0,
}
RELATIVE_ERROR = {
    "float32": 0.0,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "fp8_e4m3": 2.0**-4,
    "fp8_e5m2": 2.0**-3,
}
"""Half a unit in the last place of a plain format, as a share of a number in its normal range."""
LEAST_NORMAL = {
    "float32": 2.0**-126,
    "bfloat16": 2.0**-126,
    "float16": 2.0**-14,
    "fp8_e4m3": 2.0**-6,
    "fp8_e5m2": 2.0**-14,
}


def has_scales(kv_dtype: str) -> bool:
    return kv_dtype.endswith("_per_token_head")


@cache
def fp8_values(kv_dtype: str) -> npt.NDArray[np.float64]:
    """The number behind each of the 256 codes."""
    exponent_bits, mantissa_bits, is_finite = FP8[kv_dtype]
    bias, highest = 2 ** (exponent_bits - 1) - 1, 2**exponent_bits - 1
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> mantissa_bits
        mantissa = code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        if exponent == highest and is_finite and mantissa == 2**mantissa_bits - 1:
            values.append(np.nan)
        elif exponent == highest and not is_finite:
            values.append(np.nan if mantissa else sign * np.inf)
        elif exponent == 0:
            values.append(sign * fraction * 2.0 ** (1 - bias))
        else:
            values.append(sign * (1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values)


def decode(view: KVView, kv_dtype: str) -> npt.NDArray[np.float64]:
    """Every number that a layer holds, `[num_blocks, Hkv, 2, block_size, D]`; scales multiplied in float32."""
    raw = element_bytes(view)
    if kv_dtype in FP8:
        numbers = fp8_values(kv_dtype)[raw]
    elif kv_dtype == "int8_per_token_head":
        numbers = raw.view(np.int8).astype(np.float64)
    elif kv_dtype == "bfloat16":
        wide = raw.view(np.uint16).astype(np.uint32) << 16
        numbers = wide.view(np.float32).astype(np.float64)
    else:
        numbers = raw.view(np.dtype(kv_dtype)).astype(np.float64)
    if view.scales is None:
        return numbers
    scales = view.scales.contiguous().numpy()[..., None]
    return (numbers.astype(np.float32) * scales).astype(np.float64)


def element_bytes(view: KVView) -> Bytes:
    """The elements of a layer as bytes, `[num_blocks, Hkv, 2, block_size, D * element bytes]`."""
    return view.values.contiguous().view(torch.uint8).numpy()


def encode(numbers: npt.NDArray[np.float32], kv_dtype: str) -> tuple[Bytes, Floats | None]:
    """Bytes `[..., D * element bytes]` and scales `[...]` of numbers `[..., D]`."""
    scales = None
    if has_scales(kv_dtype):
        largest = np.abs(numbers).max(-1) / np.float32(LARGEST[kv_dtype])
        scales = np.maximum(largest, np.float32(1e-6))
        numbers = numbers / scales[..., None]
    if kv_dtype in FP8:
        return _nearest_fp8(numbers, kv_dtype), scales
    if kv_dtype == "int8_per_token_head":
        return np.clip(np.rint(numbers), -127, 127).astype(np.int8).view(np.uint8), scales
    if kv_dtype == "bfloat16":
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.astype(np.uint16).view(np.uint8), scales
    return np.ascontiguousarray(numbers.astype(np.dtype(kv_dtype))).view(np.uint8), scales


def _nearest_fp8(numbers: Floats, kv_dtype: str) -> Bytes:
    """The nearest code, the even one of two that are as near; beyond the largest, the largest."""
    table = fp8_values(kv_dtype)[:128]
    table = table[np.isfinite(table)]  # ascending, the index is the code
    magnitude = np.minimum(np.abs(numbers).astype(np.float64), table[-1])
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    below = above - 1
    to_below, to_above = magnitude - table[below], table[above] - magnitude
    takes_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    codes = np.where(takes_below, below, above)
    return (codes | (np.signbit(numbers).astype(np.int64) << 7)).astype(np.uint8)


def error_bound(numbers: npt.NDArray[np.float32], kv_dtype: str) -> npt.NDArray[np.float64]:
    """The most that a number may lose when it is stored, for numbers `[..., D]` inside the format's range."""
    magnitude = np.abs(numbers).astype(np.float64)
    if not has_scales(kv_dtype):
        normal = np.maximum(magnitude, LEAST_NORMAL[kv_dtype])
        return RELATIVE_ERROR[kv_dtype] * normal
    scales = np.maximum(magnitude.max(-1, keepdims=True) / LARGEST[kv_dtype], 1e-6)
    rounding = 2.0**-22 * magnitude  # of the division, the product and the scale itself
    if kv_dtype == "int8_per_token_head":
        return scales / 2 + rounding
    return np.maximum(magnitude, scales * 2.0**-6) * 2.0**-4 + rounding
