"""How a weight matrix is held. Models carry these and never look inside; only kernels do.

A weight is `[num_rows, num_columns]`: a product maps `num_columns` inputs to `num_rows` outputs.
"""

from __future__ import annotations

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
class PackedWeight:
    """Plain elements in an order that one backend's product reads best. packed: opaque to everyone else."""

    packed: Tensor
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Weights over the same inputs whose rows follow each other but whose formats differ."""

    parts: tuple[DenseWeight | BlockWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, num_columns)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


Weight = DenseWeight | BlockWeight | PackedWeight | StackedWeight


def stack_rows(parts: list[DenseWeight | BlockWeight]) -> Weight:
    """One weight whose rows are those of all parts, in one piece of memory where their formats agree."""
    first = parts[0]
    if len(parts) == 1:
        return first
    dense = [part.values for part in parts if isinstance(part, DenseWeight)]
    if len(dense) == len(parts):
        return DenseWeight(torch.cat(dense))
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    if len(blocks) == len(parts) and len({part.block_format for part in blocks}) == 1:
        raw = torch.cat([part.raw for part in blocks])
        return BlockWeight(raw, blocks[0].block_format, blocks[0].dtype)
    return StackedWeight(tuple(parts))
