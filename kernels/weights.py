"""How a weight matrix is held. Models carry these and never look inside; only kernels do.

A weight is `[num_rows, num_columns]`: a product maps `num_columns` inputs to `num_rows` outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gguf_formats import BlockFormat


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Plain elements. values: `[num_rows, num_columns]`, of any stride."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, num_columns)."""
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Rows of GGUF blocks, expanded when used. raw: `[num_rows, row_bytes]`, uint8."""

    raw: Tensor
    block_format: BlockFormat
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, num_columns)."""
        num_blocks = self.raw.shape[1] // self.block_format.block_bytes
        return self.raw.shape[0], num_blocks * self.block_format.block_elements


@dataclass(frozen=True, slots=True)
class ChannelWeight:
    """Eight bits an element and a scale a row: `values * scales`.

    values: `[num_rows, num_columns]` int8.
    scales: `[num_rows]` float32.
    dtype: what it expands to.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, num_columns)."""
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True, slots=True)
class GroupWeight:
    """Four bits an element, a scale and perhaps a zero for each group of columns: `(quant - zero) * scale`.

    packed: `[num_rows, num_columns / 2]` uint8; the low half of byte j is column 2j, the high half column 2j + 1.
    scales: `[num_rows, num_columns / group_size]` float32.
    zeros: as scales, the quant that stands for 0, a fraction if need be; None where it is 8 everywhere.
    group_size: columns that share a scale; even, divides num_columns.
    dtype: what it expands to.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, num_columns)."""
        return self.packed.shape[0], 2 * self.packed.shape[1]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the order that one backend's product reads best. packed: opaque to everyone else."""

    packed: object
    shape: tuple[int, int]


RowWeight = DenseWeight | BlockWeight | ChannelWeight | GroupWeight
"""A weight whose rows can be read one by one."""


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Weights over the same inputs whose rows follow each other but whose formats differ."""

    parts: tuple[RowWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, num_columns)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


Weight = RowWeight | PackedWeight | StackedWeight


def stack_rows(parts: Sequence[RowWeight]) -> Weight:
    """One weight whose rows are those of all parts, in one piece of memory where their formats agree."""
    if len(parts) == 1:
        return parts[0]
    return _joined(parts) or StackedWeight(tuple(parts))


def _joined(parts: Sequence[RowWeight]) -> RowWeight | None:
    """One piece of memory, or None where the parts' formats differ."""
    if len({_kind(part) for part in parts}) > 1:
        return None
    first = parts[0]
    if isinstance(first, DenseWeight):
        return DenseWeight(_rows(parts, "values"))
    if isinstance(first, BlockWeight):
        return BlockWeight(_rows(parts, "raw"), first.block_format, first.dtype)
    if isinstance(first, ChannelWeight):
        return ChannelWeight(_rows(parts, "values"), _rows(parts, "scales"), first.dtype)
    zeros = None if first.zeros is None else _rows(parts, "zeros")
    return GroupWeight(
        _rows(parts, "packed"), _rows(parts, "scales"), zeros, first.group_size, first.dtype
    )


def _kind(part: RowWeight) -> tuple[object, ...]:
    """What must be equal for rows to lie in one piece of memory."""
    if isinstance(part, DenseWeight):
        return (DenseWeight,)
    if isinstance(part, BlockWeight):
        return BlockWeight, part.block_format, part.dtype
    if isinstance(part, ChannelWeight):
        return ChannelWeight, part.dtype
    return GroupWeight, part.group_size, part.zeros is None, part.dtype


def _rows(parts: Sequence[RowWeight], name: str) -> Tensor:
    """A field of all parts, its rows one after the other."""
    return torch.cat([getattr(part, name) for part in parts])
