"""How K and V of a token's head become elements of a pool, and back.

Plain formats hold the number itself, rounded to nearest even; fp8 clamps to its largest finite value first. A scaled
format divides the D numbers of a head by their own scale, the largest magnitude over the largest quant (127 for int8,
448 for fp8), so that one outlier costs its own token's head only. All arithmetic is float32; every division is a
true one, so that a backend can give equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kv_view import KVView

LEAST_SCALE = 1e-6
"""Keeps the division of a head of zeros finite."""
_LARGEST_QUANT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantize(rows: Tensor, layer: KVView) -> tuple[Tensor, Tensor | None]:
    """Rows `[..., D]` as the view's elements `[..., D]`, and their scales `[...]` where it keeps any."""
    dtype = layer.values.dtype
    largest = _LARGEST_QUANT.get(dtype)
    if largest is None:
        return rows.to(dtype), None
    wide = rows.float()
    if layer.scales is None:
        return wide.clamp(-largest, largest).to(dtype), None
    scales = (wide.abs().amax(-1) / largest).clamp_(min=LEAST_SCALE)
    quants = (wide / scales.unsqueeze(-1)).clamp_(-largest, largest)
    return (quants.round_() if dtype == torch.int8 else quants).to(dtype), scales


def dequantize(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Elements `[..., D]` and their scales `[...]` as numbers of `dtype`; the product is float32."""
    if scales is None:
        return values.to(dtype)
    return (values.float() * scales.unsqueeze(-1)).to(dtype)
