"""Writes to the KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.step import StepMetadata


def _destinations(metadata: StepMetadata, block_size: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """(rows that are written, or None for all of them; their blocks; their offsets in the block)."""
    slots = metadata.slot_mapping
    is_written = slots >= 0
    rows = None if bool(is_written.all()) else is_written.nonzero().squeeze(1)
    slots = slots if rows is None else slots[rows]
    return rows, torch.div(slots, block_size, rounding_mode="floor"), slots % block_size


def write_kv(key: Tensor, value: Tensor, layer_view: Tensor, metadata: StepMetadata) -> None:
    """See `kernels.ops.write_kv`."""
    block_size = layer_view.shape[3]
    rows, blocks, offsets = metadata.once(
        ("destinations", block_size), lambda: _destinations(metadata, block_size)
    )
    if rows is not None:
        key, value = key[rows], value[rows]
    # [num_blocks, block_size, Hkv, D], strided: one row of it is one token
    layer_view.select(2, 0).transpose(1, 2)[blocks, offsets] = key.to(layer_view.dtype)
    layer_view.select(2, 1).transpose(1, 2)[blocks, offsets] = value.to(layer_view.dtype)


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """See `kernels.ops.copy_blocks`."""
    for source, destination in pairs:
        pool[destination].copy_(pool[source])
