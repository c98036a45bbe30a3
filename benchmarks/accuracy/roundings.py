"""Ways to round the inputs of every product, over the reference's operations in float32.

A simulation: values are rounded as integer arithmetic would round them, and multiplied as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.weights import Weight

Rounding = Callable[[Tensor], Tensor]


def to_levels(num_levels: int, group: int = 0) -> Rounding:
    """`scale * q`, |q| <= num_levels, a scale for each `group` of columns, or for the whole row."""

    def round_rows(rows: Tensor) -> Tensor:
        num_rows, width = rows.shape
        groups = rows.reshape(num_rows, -1, group or width)  # [T, groups, columns of a group]
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / num_levels
        return torch.round(groups / scales).mul(scales).view(num_rows, width)

    return round_rows


def to_bfloat16(rows: Tensor) -> Tensor:
    """Eight bits of every number's fraction."""
    return rows.bfloat16().float()


ROUNDINGS: dict[str, Rounding] = {
    "8 bits by 32": to_levels(127, 32),
    "8 bits by 64": to_levels(127, 64),
    "8 bits by row": to_levels(127),
    "12 bits by 32": to_levels(2039, 32),
    "16 bits by row": to_levels(32639),  # as the host kernels do
    "bfloat16": to_bfloat16,
}


class RoundedInputs:
    """The reference backend with inputs of products rounded."""

    def __init__(self, rounding: Rounding) -> None:
        self._rounding = rounding

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def linear(self, inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See `kernels.ops.linear`."""
        return reference.linear(self._rounding(inputs), weight, bias)
