"""Matrix products and embedding look-ups over weights of every format: which kernel serves which weight.

Quantised weights are fast after `pack`, which puts them in planes once at load. Without it they are expanded at each
product: right, and slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from kernels.reference import quants
from kernels.triton import settings
from kernels.triton.dense import dense_linear
from kernels.triton.eight_bit import eight_bit_linear
from kernels.triton.four_bit import four_bit_linear
from kernels.triton.gguf_rows import PLAIN_FORMATS, expand
from kernels.triton.planes import Planes, blocks_to_planes, groups_to_planes
from kernels.weights import (
    BlockWeight,
    ChannelWeight,
    DenseWeight,
    GroupWeight,
    PackedWeight,
    StackedWeight,
    Weight,
)


def embedding(token_ids: Tensor, weight: Weight) -> Tensor:
    """See `kernels.ops.embedding`."""
    assert not isinstance(weight, PackedWeight | StackedWeight), (
        "an embedding is one matrix whose rows can be read"
    )
    if isinstance(weight, BlockWeight):
        return expand(weight, token_ids)
    return quants.dequantize(quants.select_rows(weight, token_ids))


def pack(weight: Weight) -> Weight:
    """See `kernels.ops.pack`. What is packed is `Planes`, or one packed weight after the other."""
    if isinstance(weight, StackedWeight):
        return PackedWeight(tuple(pack(part) for part in weight.parts), weight.shape)
    if isinstance(weight, BlockWeight):
        if weight.block_format.name in PLAIN_FORMATS:
            return DenseWeight(expand(weight))
        return PackedWeight(blocks_to_planes(weight), weight.shape)
    if isinstance(weight, GroupWeight):
        planes = groups_to_planes(weight)
        if planes is None:
            return DenseWeight(quants.dequantize(weight))
        return PackedWeight(planes, weight.shape)
    return weight


def pack_rows(weight: Weight) -> Weight:
    """See `kernels.ops.pack_rows`: `embedding` reads every order."""
    return weight


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.ops.linear`."""
    assert inputs.stride(-1) == 1, "rows are contiguous"
    if isinstance(weight, DenseWeight) and _may_take_library(inputs):
        return F.linear(inputs, weight.values, bias)
    output = inputs.new_empty(inputs.shape[0], weight.shape[0])
    _linear_into(inputs, weight, bias, output)
    return output


def _may_take_library(inputs: Tensor) -> bool:
    """Whether the vendor's library may do a product: on a card, where bits may depend on the number of rows."""
    return inputs.is_cuda and not settings.is_batch_invariant()


def _linear_into(inputs: Tensor, weight: Weight, bias: Tensor | None, output: Tensor) -> None:
    """Write `inputs @ weight^T + bias` into `output [T, N]`, whose rows may lie apart."""
    if isinstance(weight, StackedWeight):
        _stack_into(inputs, weight.parts, bias, output)
    elif isinstance(weight, PackedWeight) and isinstance(weight.packed, tuple):
        _stack_into(inputs, weight.packed, bias, output)
    elif isinstance(weight, PackedWeight):
        assert isinstance(weight.packed, Planes), "packed by another backend"
        run = four_bit_linear if weight.packed.bits == 4 else eight_bit_linear
        run(inputs, weight.packed, bias, output)
    elif isinstance(weight, ChannelWeight):
        eight_bit_linear(inputs, weight, bias, output)
    else:
        values = expand(weight) if isinstance(weight, BlockWeight) else quants.dequantize(weight)
        if _may_take_library(inputs):
            output.copy_(F.linear(inputs, values, bias))
        else:
            dense_linear(inputs, values, bias, output)


def _stack_into(
    inputs: Tensor, parts: Sequence[Weight], bias: Tensor | None, output: Tensor
) -> None:
    """Each part's outputs behind those of the part before."""
    first = 0
    for part in parts:
        rows = slice(first, first + part.shape[0])
        _linear_into(inputs, part, None if bias is None else bias[rows], output[:, rows])
        first = rows.stop
