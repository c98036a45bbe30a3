"""Matrix products and embedding look-ups over dense and block weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.gguf_blocks import dequantize
from kernels.reference.packing import packed_linear
from kernels.weights import BlockWeight, DenseWeight, PackedWeight, Weight


def embedding(token_ids: Tensor, weight: Weight) -> Tensor:
    """See `kernels.ops.embedding`."""
    if isinstance(weight, DenseWeight):
        return weight.values.index_select(0, token_ids)
    assert isinstance(weight, BlockWeight), "an embedding is one matrix whose rows can be read"
    return dequantize(weight.raw.index_select(0, token_ids), weight.block_format, weight.dtype)


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.ops.linear`."""
    if isinstance(weight, DenseWeight):
        return F.linear(inputs, weight.values, bias)
    if isinstance(weight, PackedWeight):
        return packed_linear(inputs, weight, bias)
    if isinstance(weight, BlockWeight):
        return F.linear(inputs, dequantize(weight.raw, weight.block_format, weight.dtype), bias)
    outputs = torch.cat([linear(inputs, part) for part in weight.parts], dim=1)
    return outputs if bias is None else outputs.add_(bias)
