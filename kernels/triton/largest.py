"""The largest logit of each row and the lowest id that has it: pieces of a row first, then the pieces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tuning import VOCABULARY_BLOCK

_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def largest_and_id(values, ids):
    """The largest of a block of values, and the lowest of the ids that have it."""
    largest = tl.max(values, axis=0)
    return largest, tl.min(tl.where(values == largest, ids, _NO_ID), axis=0)


@triton.jit
def _pieces_kernel(
    logits_ptr, values_ptr, ids_ptr, row_stride, vocab_size, num_pieces, BLOCK: tl.constexpr
):
    row, piece = tl.program_id(0), tl.program_id(1)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    source = logits_ptr + row.to(tl.int64) * row_stride + column
    values = tl.load(source, mask=column < vocab_size, other=float("-inf"))
    largest, lowest = largest_and_id(values, column)
    tl.store(values_ptr + row * num_pieces + piece, largest)
    tl.store(ids_ptr + row * num_pieces + piece, lowest)


@triton.jit
def _rows_kernel(values_ptr, ids_ptr, largest_ptr, lowest_ptr, num_pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    piece = tl.arange(0, BLOCK)
    is_piece = piece < num_pieces
    values = tl.load(values_ptr + row * num_pieces + piece, mask=is_piece, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_pieces + piece, mask=is_piece, other=_NO_ID)
    largest, lowest = largest_and_id(values, ids)
    tl.store(largest_ptr + row, largest)
    tl.store(lowest_ptr + row, lowest.to(tl.int64))


def largest_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, float32 `[rows]`, and its lowest id, int64 `[rows]`."""
    num_rows, vocab_size = logits.shape
    block = min(VOCABULARY_BLOCK, triton.next_power_of_2(vocab_size))
    num_pieces = triton.cdiv(vocab_size, block)
    values = logits.new_empty(num_rows, num_pieces)
    ids = torch.empty_like(values, dtype=torch.int32)
    largest = logits.new_empty(num_rows)
    lowest = torch.empty_like(largest, dtype=torch.int64)
    launch(
        _pieces_kernel,
        (num_rows, num_pieces),
        logits,
        values,
        ids,
        logits.stride(0),
        vocab_size,
        num_pieces,
        BLOCK=block,
        num_warps=4,
    )
    launch(
        _rows_kernel,
        (num_rows,),
        values,
        ids,
        largest,
        lowest,
        num_pieces,
        BLOCK=triton.next_power_of_2(num_pieces),
        num_warps=1,
    )
    return largest, lowest


def argmax(logits: Tensor) -> Tensor:
    """See `kernels.ops.argmax`."""
    return largest_logits(logits)[1]
