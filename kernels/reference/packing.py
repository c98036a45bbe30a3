"""Dense weights in the blocked order of oneDNN, which torch carries.

A product of few rows with a plain matrix re-orders the matrix at each call; one with a packed matrix does not, and
takes about half the time at 4 to 32 rows. On matrices with many more outputs than inputs a single row costs the same
either way; on others it is slower by up to a third, so those stay plain. Values are the same; only the order of
summation may differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.weights import DenseWeight, PackedWeight, Weight

_LEAST_WIDTH = 4  # outputs an input, from which packing pays
_EXPECTED_ROWS = 64  # the number of rows whose best order is taken; others differ little from it


def pack(weight: Weight) -> Weight:
    """See `kernels.ops.pack`."""
    if not isinstance(weight, DenseWeight) or not _pays(weight):
        return weight
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.values.contiguous(), _EXPECTED_ROWS)
    return PackedWeight(packed, weight.shape)


def pack_rows(weight: Weight) -> Weight:
    """See `kernels.ops.pack_rows`."""
    return weight


def packed_linear(inputs: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """`inputs @ weight^T + bias`."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight.packed, bias, "none", [], "")
    return result


def _pays(weight: DenseWeight) -> bool:
    num_rows, num_columns = weight.shape
    is_wide = num_rows >= _LEAST_WIDTH * num_columns
    return is_wide and weight.values.dtype == torch.float32 and _is_available()


def _is_available() -> bool:
    """Whether this build of torch has the two operations, which are not part of its documented surface."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and all(hasattr(torch.ops.mkldnn, name) for name in names)
