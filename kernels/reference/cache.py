"""Writes to the KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_view import KVView
from kernels.reference.kv_formats import quantize
from kernels.step import StepMetadata


def _destinations(metadata: StepMetadata, block_size: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """(rows that are written, or None for all of them; their blocks; their offsets in the block)."""
    slots = metadata.slot_mapping
    is_written = slots >= 0
    rows = None if bool(is_written.all()) else is_written.nonzero().squeeze(1)
    slots = slots if rows is None else slots[rows]
    return rows, torch.div(slots, block_size, rounding_mode="floor"), slots % block_size


def write_kv(key: Tensor, value: Tensor, layer: KVView, metadata: StepMetadata) -> None:
    """See `kernels.ops.write_kv`."""
    block_size = layer.block_size
    rows, blocks, offsets = metadata.once(
        ("destinations", block_size), lambda: _destinations(metadata, block_size)
    )
    for part, heads in enumerate((key, value)):
        values, scales = quantize(heads if rows is None else heads[rows], layer)
        # [num_blocks, block_size, Hkv, D], strided: one row of it is one token
        layer.values.select(2, part).transpose(1, 2)[blocks, offsets] = values
        if layer.scales is not None and scales is not None:
            layer.scales.select(2, part).transpose(1, 2)[blocks, offsets] = scales


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """See `kernels.ops.copy_blocks`."""
    for source, destination in pairs:
        pool[destination].copy_(pool[source])
