"""Log-probabilities row by row: the rank of a token and the best ids, pieces of the row first, then the pieces.

A piece's best are found one after the other, each the largest behind the one before it in the order "largest first,
then lowest id", and so are the best of the pieces' best: the order of the rule, whatever equals whatever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.drawing import log_normalisers
from kernels.triton.largest import largest_and_id
from kernels.triton.launch import launch
from kernels.triton.tuning import VOCABULARY_BLOCK
from kernels.workspace import Workspace


@triton.jit
def _best_first(values, ids, values_ptr, ids_ptr, num_best):
    """Store the best of a block in order; ids of what is not there are 2**31 - 1."""
    for number in range(num_best):
        largest, lowest = largest_and_id(values, ids)
        tl.store(values_ptr + number, largest)
        tl.store(ids_ptr + number, lowest)
        is_taken = ids == lowest
        values = tl.where(is_taken, float("-inf"), values)
        ids = tl.where(is_taken, 2**31 - 1, ids)


@triton.jit
def _pieces_kernel(
    row_ptr,
    values_ptr,
    ids_ptr,
    counts_ptr,
    token_id,
    vocab_size,
    num_best,
    BLOCK: tl.constexpr,
):
    """The best of one piece, and how many of its logits are larger than the token's."""
    piece = tl.program_id(0)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    is_column = column < vocab_size
    values = tl.load(row_ptr + column, mask=is_column, other=float("-inf"))
    chosen = tl.load(row_ptr + token_id)
    tl.store(counts_ptr + piece, tl.sum((values > chosen).to(tl.int32), axis=0))
    ids = tl.where(is_column, column, 2**31 - 1)
    _best_first(values, ids, values_ptr + piece * num_best, ids_ptr + piece * num_best, num_best)


@triton.jit
def _row_kernel(
    piece_values_ptr,
    piece_ids_ptr,
    values_ptr,
    ids_ptr,
    num_candidates,
    num_best,
    BLOCK: tl.constexpr,
):
    """The best of the pieces' best."""
    place = tl.arange(0, BLOCK)
    is_candidate = place < num_candidates
    values = tl.load(piece_values_ptr + place, mask=is_candidate, other=float("-inf"))
    ids = tl.load(piece_ids_ptr + place, mask=is_candidate, other=2**31 - 1)
    _best_first(values, ids, values_ptr, ids_ptr, num_best)


def token_logprobs(
    logits: Tensor,
    rows: Sequence[int],
    token_ids: Sequence[int],
    num_top: Sequence[int],
    workspace: Workspace,
) -> list[tuple[float, int, list[int], list[float]]]:
    """See `kernels.ops.token_logprobs`. The workspace is host memory and stays unused."""
    if not rows:
        return []
    own = logits[torch.tensor(rows, device=logits.device)]  # [rows asked for, vocab]
    normalisers = log_normalisers(own, workspace).tolist()
    assert all(map(math.isfinite, normalisers)), "logits are not finite"
    asked = zip(own, normalisers, token_ids, num_top, strict=True)
    return [row_logprobs(*each) for each in asked]


def row_logprobs(
    row: Tensor, normaliser: float, token_id: int, num_top: int
) -> tuple[float, int, list[int], list[float]]:
    """See `kernels.reference.sampling.row_logprobs`."""
    assert row.is_contiguous(), "a row is contiguous"
    vocab_size = len(row)
    num_best = min(num_top, vocab_size)
    block = min(VOCABULARY_BLOCK, triton.next_power_of_2(vocab_size))
    num_pieces = triton.cdiv(vocab_size, block)
    counts = torch.empty(num_pieces, dtype=torch.int32, device=row.device)
    values = row.new_empty(num_pieces, num_best)
    ids = torch.empty_like(values, dtype=torch.int32)
    launch(
        _pieces_kernel,
        (num_pieces,),
        row,
        values,
        ids,
        counts,
        token_id,
        vocab_size,
        num_best,
        BLOCK=block,
        num_warps=4,
    )
    best_values, best_ids = row.new_empty(num_best), counts.new_empty(num_best)
    if num_best:
        num_candidates = num_pieces * num_best
        launch(
            _row_kernel,
            (1,),
            values,
            ids,
            best_values,
            best_ids,
            num_candidates,
            num_best,
            BLOCK=triton.next_power_of_2(num_candidates),
            num_warps=4,
        )
    logprobs = [float(value) - normaliser for value in best_values.tolist()]
    return float(row[token_id]) - normaliser, 1 + int(counts.sum()), best_ids.tolist(), logprobs
