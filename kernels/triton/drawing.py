"""Draws tokens by the rule in `kernels.reference.sampling`: the same steps, folds and ties, on the card.

Weights are float64 `[rows, blocks of FOLD_BLOCK ids]`. Each block is folded left to right by one lane, then the
blocks' sums, then the one block that the number falls into: the plain left folds of the rule, not the trees that
cards like better, so that a seed gives the token that it gives everywhere. exp is the card's own and not the rule's: a
number that falls within its last bits of a boundary may draw the neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.sampling import FOLD_BLOCK
from kernels.triton.kept_ids import drop_above_top_p, least_logits
from kernels.triton.largest import largest_logits
from kernels.triton.launch import launch
from kernels.workspace import Workspace

_FOLD_BLOCK = tl.constexpr(FOLD_BLOCK)
_FOLDED_BLOCKS = 32  # blocks of one program of the fold: a warp's lanes


@triton.jit
def _weights_kernel(
    logits_ptr,
    largest_ptr,
    temperatures_ptr,
    least_logits_ptr,
    least_weights_ptr,
    weights_ptr,
    row_stride,
    vocab_size,
    num_blocks,
):
    """exp((logit - largest) / temperature) of one block of ids; 0 for what top-k or min-p drop."""
    row, block = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, _FOLD_BLOCK)
    column = block * _FOLD_BLOCK + index
    source = logits_ptr + row.to(tl.int64) * row_stride + column
    logit = tl.load(source, mask=column < vocab_size, other=float("-inf"))
    largest = tl.load(largest_ptr + row).to(tl.float64)
    weight = tl.exp((logit.to(tl.float64) - largest) / tl.load(temperatures_ptr + row))
    weight = tl.where(weight < tl.load(least_weights_ptr + row), 0.0, weight)
    weight = tl.where(logit < tl.load(least_logits_ptr + row), 0.0, weight)
    target = weights_ptr + (row * num_blocks + block).to(tl.int64) * _FOLD_BLOCK
    tl.store(target + index, weight)


@triton.jit
def _fold_kernel(weights_ptr, sums_ptr, num_blocks, BLOCK: tl.constexpr):
    """The sum of each block of a row, its ids left to right."""
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_block = block < num_blocks
    place = (row * num_blocks + block).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for index in range(_FOLD_BLOCK):
        source = weights_ptr + place * _FOLD_BLOCK + index
        total += tl.load(source, mask=is_block, other=0.0)
    tl.store(sums_ptr + place, total, mask=is_block)


@triton.jit
def _choose_kernel(weights_ptr, sums_ptr, uniforms_ptr, ids_ptr, totals_ptr, num_blocks):
    """The first id whose cumulative weight exceeds its row's share of the total; the total itself."""
    row = tl.program_id(0)
    sums = sums_ptr + row.to(tl.int64) * num_blocks
    total = tl.load(sums)
    for block in range(1, num_blocks):
        total += tl.load(sums + block)
    threshold = tl.load(uniforms_ptr + row) * total
    # Cumulative sums never decrease: those at or below the threshold come first, and the last of them is `before`.
    running = tl.load(sums)
    before = total * 0.0
    chosen = tl.zeros([], dtype=tl.int64)
    for block in range(1, num_blocks):
        is_passed = running <= threshold
        before = tl.where(is_passed, running, before)
        chosen += is_passed.to(tl.int64)
        running += tl.load(sums + block)
    weights = weights_ptr + (row.to(tl.int64) * num_blocks + chosen) * _FOLD_BLOCK
    inside = tl.load(weights)
    place = tl.zeros([], dtype=tl.int64)
    for index in range(1, _FOLD_BLOCK):
        place += (before + inside <= threshold).to(tl.int64)
        inside += tl.load(weights + index)
    tl.store(ids_ptr + row, chosen * _FOLD_BLOCK + place)
    tl.store(totals_ptr + row, total)


def draw(
    logits: Tensor,
    uniforms: Tensor,
    temperatures: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    workspace: Workspace,
) -> Tensor:
    """See `kernels.ops.draw`. The workspace is host memory and stays unused."""
    least = least_logits(logits, top_k)
    weights = _weights(logits, largest_logits(logits)[0], temperatures, least, min_p)
    drop_above_top_p(weights, top_p)
    ids, totals = _choose(weights, uniforms.to(logits.device))
    assert bool(totals.isfinite().all()), "logits are not finite"
    return ids


def log_normalisers(logits: Tensor, workspace: Workspace) -> Tensor:
    """See `kernels.reference.sampling.log_normalisers`. The workspace is host memory and stays unused."""
    num_rows = len(logits)
    largest = largest_logits(logits)[0]
    keep_all = torch.full_like(largest, float("-inf"))
    weights = _weights(logits, largest, [1.0] * num_rows, keep_all, [0.0] * num_rows)
    zeros = torch.zeros(num_rows, dtype=torch.float64, device=logits.device)
    return largest.double() + _choose(weights, zeros)[1].log()


def _weights(
    logits: Tensor,
    largest: Tensor,
    temperatures: Sequence[float],
    least: Tensor,
    min_p: Sequence[float],
) -> Tensor:
    """Weights `[rows, blocks, FOLD_BLOCK]`; 0 behind the last id and for ids that are dropped."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    num_blocks = triton.cdiv(vocab_size, FOLD_BLOCK)
    weights = torch.empty(num_rows, num_blocks, FOLD_BLOCK, dtype=torch.float64, device=device)
    launch(
        _weights_kernel,
        (num_rows, num_blocks),
        logits,
        largest,
        torch.tensor(temperatures, dtype=torch.float64, device=device),
        least,
        torch.tensor(min_p, dtype=torch.float64, device=device),
        weights,
        logits.stride(0),
        vocab_size,
        num_blocks,
        num_warps=4,
    )
    return weights


def _choose(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Ids int64 `[rows]` and totals float64 `[rows]`."""
    num_rows, num_blocks = weights.shape[:2]
    sums = weights.new_empty(num_rows, num_blocks)
    launch(
        _fold_kernel,
        (num_rows, triton.cdiv(num_blocks, _FOLDED_BLOCKS)),
        weights,
        sums,
        num_blocks,
        BLOCK=_FOLDED_BLOCKS,
        num_warps=1,
    )
    totals = weights.new_empty(num_rows)
    ids = torch.empty_like(totals, dtype=torch.int64)
    launch(
        _choose_kernel,
        (num_rows,),
        weights,
        sums,
        uniforms,
        ids,
        totals,
        num_blocks,
        num_warps=1,
    )
    return ids, totals
