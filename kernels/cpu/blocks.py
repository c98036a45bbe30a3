"""Whole blocks of KV, moved and converted natively: the reference's bytes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.arguments import kv_view
from kernels.cpu.structs import ConvertKv, MoveBlocks, Op
from kernels.cpu.team import Team
from kernels.kv_view import KVView


def copy_blocks(team: Team, pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """See `kernels.ops.copy_blocks`."""
    sources, destinations = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    _move(team, pool, sources, pool, destinations)


def gather_blocks(team: Team, pool: Tensor, block_ids: Sequence[int]) -> Tensor:
    """See `kernels.ops.gather_blocks`."""
    staging = torch.empty(len(block_ids), pool.shape[1], dtype=torch.uint8)
    _move(team, pool, block_ids, staging, range(len(block_ids)))
    return staging


def scatter_blocks(team: Team, staging: Tensor, pool: Tensor, block_ids: Sequence[int]) -> None:
    """See `kernels.ops.scatter_blocks`."""
    assert len(staging) == len(block_ids), "a block for each row"
    _move(team, staging, range(len(block_ids)), pool, block_ids)


def convert_kv(
    team: Team,
    source: KVView,
    source_blocks: Sequence[int],
    destination: KVView,
    destination_blocks: Sequence[int],
) -> None:
    """See `kernels.ops.convert_kv`."""
    assert source.values.shape[1:] == destination.values.shape[1:], "blocks of one shape"
    assert len(source_blocks) == len(destination_blocks), "a destination for each source"
    taken = _ids(source_blocks, source.num_blocks)
    given = _ids(destination_blocks, destination.num_blocks)
    addresses = taken.buffer_info()[0], given.buffer_info()[0]
    arguments = ConvertKv(kv_view(source), kv_view(destination), *addresses)
    if taken:
        team.run_alone(Op.CONVERT_KV, arguments, len(taken))


def _move(
    team: Team, source: Tensor, taken: Sequence[int], destination: Tensor, given: Sequence[int]
) -> None:
    if not taken:
        return
    assert source.dtype == destination.dtype == torch.uint8, "blocks are bytes"
    assert source.shape[1] == destination.shape[1], "blocks of one size"
    assert source.stride(1) == destination.stride(1) == 1, "a block's bytes follow each other"
    source_ids, destination_ids = _ids(taken, len(source)), _ids(given, len(destination))
    arguments = MoveBlocks(
        source.data_ptr(),
        destination.data_ptr(),
        source_ids.buffer_info()[0],
        destination_ids.buffer_info()[0],
        source.stride(0),
        destination.stride(0),
        source.shape[1],
    )
    team.run_alone(Op.MOVE_BLOCKS, arguments, len(source_ids))


def _ids(block_ids: Sequence[int], num_blocks: int) -> array[int]:
    assert not block_ids or 0 <= min(block_ids) <= max(block_ids) < num_blocks, "blocks of the pool"
    return array("q", block_ids)
