"""Normalisation, rotation and activation, row by row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See `kernels.ops.rms_norm`."""
    wide = hidden.float()
    inverse = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return (wide * inverse).to(hidden.dtype).mul_(weight)


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.add_rms_norm`."""
    total = residual.add_(hidden)
    return rms_norm(total, weight, epsilon), total


def rope_angles(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.rope_angles`."""
    angles = torch.outer(positions.float(), frequencies)
    return angles.cos().mul_(factor).to(dtype), angles.sin().mul_(factor).to(dtype)


def take_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """See `kernels.ops.take_rows`."""
    return hidden if rows.shape[0] == hidden.shape[0] else hidden.index_select(0, rows)


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.ops.rope`."""
    first, second = heads.chunk(2, dim=-1)  # [T, heads, D/2] each
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
    out_first, out_second = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return rotated


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.ops.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.ops.gelu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
