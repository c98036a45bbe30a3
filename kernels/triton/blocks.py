"""Whole blocks of a byte pool: copied inside it, gathered from it, scattered into it.

A block is one run of bytes, moved as the widest words that its size and place allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tuning import MOVED_WORDS

_WORDS = (torch.int64, torch.int32, torch.int16)


@triton.jit
def _move_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    source_stride,
    target_stride,
    num_words,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row i: block source_ids[i] of the source becomes block target_ids[i] of the target; without ids, block i."""
    row = tl.program_id(0).to(tl.int64)
    source, target = row, row
    if HAS_SOURCE_IDS:
        source = tl.load(source_ids_ptr + row)
    if HAS_TARGET_IDS:
        target = tl.load(target_ids_ptr + row)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_word = word < num_words
    words = tl.load(source_ptr + source * source_stride + word, mask=is_word)
    tl.store(target_ptr + target * target_stride + word, words, mask=is_word)


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """See `kernels.ops.copy_blocks`."""
    for wave in waves(pairs):
        sources, targets = (list(ids) for ids in zip(*wave, strict=True))
        _move(pool, _ids(sources, pool), pool, _ids(targets, pool))


def gather_blocks(pool: Tensor, block_ids: Sequence[int]) -> Tensor:
    """See `kernels.ops.gather_blocks`. The result lies where the pool does."""
    staging = pool.new_empty(len(block_ids), pool.shape[1])
    _move(pool, _ids(block_ids, pool), staging, None)
    return staging


def scatter_blocks(staging: Tensor, pool: Tensor, block_ids: Sequence[int]) -> None:
    """See `kernels.ops.scatter_blocks`. The staging lies where the pool does."""
    _move(staging, None, pool, _ids(block_ids, pool))


def waves(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Pairs (source, destination) in order, cut where one depends on an earlier one: a wave may run in any order."""
    result: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if not result or source in written or destination in written or destination in read:
            result.append([])
            read, written = set(), set()
        result[-1].append((source, destination))
        read.add(source)
        written.add(destination)
    return result


def _ids(block_ids: Sequence[int], pool: Tensor) -> Tensor:
    return torch.tensor(block_ids, dtype=torch.int64, device=pool.device)


def _move(
    source: Tensor, source_ids: Tensor | None, target: Tensor, target_ids: Tensor | None
) -> None:
    """Copy rows `[block_bytes]` of bytes; both tensors have contiguous rows."""
    ids = target_ids if source_ids is None else source_ids
    assert ids is not None, "one side is a pool"
    source, target = _as_words(source, target)
    num_words = source.shape[1]
    block = min(MOVED_WORDS, triton.next_power_of_2(num_words))
    launch(
        _move_kernel,
        (len(ids), triton.cdiv(num_words, block)),
        source,
        target,
        ids if source_ids is None else source_ids,  # never read where there are none
        ids if target_ids is None else target_ids,  # likewise
        source.stride(0),
        target.stride(0),
        num_words,
        HAS_SOURCE_IDS=source_ids is not None,
        HAS_TARGET_IDS=target_ids is not None,
        BLOCK=block,
        num_warps=4,
    )


def _as_words(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as the widest words that fit their rows and addresses."""
    for dtype in _WORDS:
        places = (source.data_ptr(), target.data_ptr(), source.stride(0), target.stride(0))
        if all(place % dtype.itemsize == 0 for place in (*places, source.shape[1])):
            return source.view(dtype), target.view(dtype)
    return source, target
