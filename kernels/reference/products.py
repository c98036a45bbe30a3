"""Matrix products and embedding look-ups over weights of every format."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.packing import packed_linear
from kernels.reference.quants import dequantize, select_rows
from kernels.weights import PackedWeight, StackedWeight, Weight


def embedding(token_ids: Tensor, weight: Weight) -> Tensor:
    """See `kernels.ops.embedding`."""
    assert not isinstance(weight, PackedWeight | StackedWeight), (
        "an embedding is one matrix whose rows can be read"
    )
    return dequantize(select_rows(weight, token_ids))


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.ops.linear`."""
    if isinstance(weight, PackedWeight):
        return packed_linear(inputs, weight, bias)
    if isinstance(weight, StackedWeight):
        outputs = torch.cat([linear(inputs, part) for part in weight.parts], dim=1)
        return outputs if bias is None else outputs.add_(bias)
    return F.linear(inputs, dequantize(weight), bias)
