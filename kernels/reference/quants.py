"""Quantised weights to floating point, as their formats define them. The arithmetic is float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.gguf_blocks import dequantize as dequantize_blocks
from kernels.weights import BlockWeight, ChannelWeight, DenseWeight, GroupWeight, RowWeight

_MIDDLE = 8.0  # the quant that stands for 0 where a group names none


def dequantize(weight: RowWeight) -> Tensor:
    """The elements of a weight, `[num_rows, num_columns]` of its dtype."""
    if isinstance(weight, DenseWeight):
        return weight.values
    if isinstance(weight, BlockWeight):
        return dequantize_blocks(weight.raw, weight.block_format, weight.dtype)
    if isinstance(weight, ChannelWeight):
        return (weight.values.float() * weight.scales.unsqueeze(1)).to(weight.dtype)
    return _dequantize_groups(weight)


def select_rows(weight: RowWeight, rows: Tensor) -> RowWeight:
    """Some rows of a weight `[n]`, in its own format."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values.index_select(0, rows))
    if isinstance(weight, BlockWeight):
        return BlockWeight(weight.raw.index_select(0, rows), weight.block_format, weight.dtype)
    scales = weight.scales.index_select(0, rows)
    if isinstance(weight, ChannelWeight):
        return ChannelWeight(weight.values.index_select(0, rows), scales, weight.dtype)
    packed = weight.packed.index_select(0, rows)
    zeros = None if weight.zeros is None else weight.zeros.index_select(0, rows)
    return GroupWeight(packed, scales, zeros, weight.group_size, weight.dtype)


def _dequantize_groups(weight: GroupWeight) -> Tensor:
    """`(quant - zero) * scale`, group by group."""
    num_rows, num_columns = weight.shape
    quants = torch.stack((weight.packed & 0x0F, weight.packed >> 4), dim=-1).float()
    num_groups = num_columns // weight.group_size
    groups = quants.view(num_rows, num_groups, weight.group_size)
    if weight.zeros is None:
        centred = groups - _MIDDLE
    else:
        centred = groups - weight.zeros.unsqueeze(-1)
    scaled = centred * weight.scales.unsqueeze(-1)
    return scaled.view(num_rows, num_columns).to(weight.dtype)
