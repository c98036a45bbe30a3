"""Writes to the KV pool, and whole blocks of it moved and converted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_view import KVView
from kernels.reference.kv_formats import dequantize, quantize
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


def gather_blocks(pool: Tensor, block_ids: Sequence[int]) -> Tensor:
    """See `kernels.ops.gather_blocks`."""
    return pool.index_select(0, torch.tensor(block_ids, dtype=torch.int64))


def scatter_blocks(staging: Tensor, pool: Tensor, block_ids: Sequence[int]) -> None:
    """See `kernels.ops.scatter_blocks`."""
    pool.index_copy_(0, torch.tensor(block_ids, dtype=torch.int64), staging)


def convert_kv(
    source: KVView,
    source_blocks: Sequence[int],
    destination: KVView,
    destination_blocks: Sequence[int],
) -> None:
    """See `kernels.ops.convert_kv`."""
    assert source.values.shape[1:] == destination.values.shape[1:], "blocks of one shape"
    assert len(source_blocks) == len(destination_blocks), "a destination for each source"
    taken = torch.tensor(source_blocks, dtype=torch.int64)
    scales = None if source.scales is None else source.scales[taken]
    numbers = dequantize(source.values[taken], scales, torch.float32)  # [n, Hkv, 2, block_size, D]
    values, scales = quantize(numbers, destination)
    given = torch.tensor(destination_blocks, dtype=torch.int64)
    destination.values[given] = values
    if destination.scales is not None and scales is not None:
        destination.scales[given] = scales
