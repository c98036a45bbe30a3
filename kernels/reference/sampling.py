"""From logits to tokens: the specification.

A row's token depends on its own logits, parameters and random number only, never on the rows beside it. Steps, in the
order of vLLM, and what this module fixes where others leave it open:

    adjust    allowed ids, banned ids, bias, then repetition, frequency, presence penalty (float32, in place)
    greedy    the largest logit; the lowest id among equals
    weights   exp((logit - largest) / temperature), float64, by the steps of `kernels.reference.exponential`
    min-p     keep weights of at least min_p times the largest, which is 1
    top-k     keep logits of at least the k-th largest: all that equal it stay
    top-p     keep the fewest, largest first, whose sum reaches top_p of what is kept so far; all that equal the last
              of them stay
    draw      the first kept id, in ascending order, whose cumulative weight exceeds u x total

Cumulative weights are folded left to right in blocks of 256 ids, and then over the blocks' sums: the number at id i
is sum(earlier blocks) + sum(own block up to i), each a plain left fold in float64. It never decreases, and reaches
the total at the last id exactly, so every u in [0, 1) has its id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference.exponential import PIECE, exponentiate
from kernels.workspace import Workspace

FOLD_BLOCK = 256
"""Ids under one partial sum: part of the rule, not a tuning knob."""

_BANNED = float("-inf")
_CHUNK_ROWS = 8  # worked on at a time, so that their float64 weights stay in cache


# ---------------------------------------------------------------- adjustments of one row, in place


def allow_only(row: Tensor, token_ids: Tensor) -> None:
    """Ban every id of a row [vocab] that is not among `token_ids` [n]."""
    kept = row[token_ids]
    row.fill_(_BANNED)
    row[token_ids] = kept


def ban(row: Tensor, token_ids: Tensor) -> None:
    """Make ids [n] of a row [vocab] impossible; a ban on every id that is left bans none."""
    kept = row[token_ids]
    row[token_ids] = _BANNED
    if float(row.amax()) == _BANNED:
        row[token_ids] = kept


def add_bias(row: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """Add bias [n] to the logits of ids [n] of a row [vocab]; an id that is named twice gets both."""
    row.index_add_(0, token_ids, bias)


def penalise_repetition(row: Tensor, seen: Tensor, penalty: float) -> None:
    """Divide positive and multiply other logits of ids that occur in prompt or output. seen: [n], repeats allowed."""
    logits = row[seen]
    row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)


def penalise_frequency(
    row: Tensor, output: Tensor, frequency_penalty: float, presence_penalty: float
) -> None:
    """Subtract frequency_penalty for each time an id occurs in the output [n], presence_penalty if it does at all."""
    token_ids, counts = torch.unique(output, return_counts=True)
    row[token_ids] = row[token_ids] - frequency_penalty * counts.to(row.dtype) - presence_penalty


# ---------------------------------------------------------------- choosing


def argmax(logits: Tensor) -> Tensor:
    """The lowest id of the largest logit of each row: [rows, vocab] -> int64 [rows]."""
    num_rows, vocab_size = logits.shape
    num_blocks = vocab_size // FOLD_BLOCK
    if num_blocks * FOLD_BLOCK != vocab_size:
        return logits.argmax(dim=-1)
    # Largest of each block, first block that has the largest of all, first place in it: one fast pass.
    blocks = logits.view(num_rows, num_blocks, FOLD_BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)  # [rows]
    inside = blocks[torch.arange(num_rows), block].argmax(dim=-1)  # [rows]
    return block * FOLD_BLOCK + inside


def draw(
    logits: Tensor,
    uniforms: Tensor,
    temperatures: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    workspace: Workspace,
) -> Tensor:
    """One id a row: logits float32 [rows, vocab], uniforms float64 [rows] in [0, 1); result int64 [rows].

    Temperatures are above 0. top_k 0, top_p 1 and min_p 0 keep all.
    """
    drawn = torch.empty(len(logits), dtype=torch.int64)
    for start in range(0, len(logits), _CHUNK_ROWS):
        own = slice(start, start + _CHUNK_ROWS)
        settings = (temperatures[own], top_k[own], top_p[own], min_p[own])
        drawn[own] = _draw(logits[own], uniforms[own], *settings, workspace)
    return drawn


def _draw(
    logits: Tensor,
    uniforms: Tensor,
    temperatures: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    workspace: Workspace,
) -> Tensor:
    weights = to_weights(logits, temperatures, workspace)
    flat = weights.flatten(1)  # [rows, vocab, padded to whole blocks]
    for index in range(len(logits)):
        if min_p[index] > 0:
            flat[index].masked_fill_(flat[index] < min_p[index], 0.0)
        if 0 < top_k[index] < logits.shape[1]:
            _keep_top_k(flat[index], logits[index], top_k[index])
        if top_p[index] < 1:
            _keep_top_p(flat[index], top_p[index])
    return _first_above(weights, uniforms)


def to_weights(logits: Tensor, temperatures: Sequence[float], workspace: Workspace) -> Tensor:
    """exp((logit - largest) / temperature), float64 [rows, blocks, FOLD_BLOCK]; zero behind the last id."""
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // FOLD_BLOCK)
    size = num_rows * num_blocks * FOLD_BLOCK
    memory = workspace.take(size + 3 * PIECE)
    weights = memory[:size].view(num_rows, num_blocks, FOLD_BLOCK)
    flat = weights.view(num_rows, -1)
    flat[:, :vocab_size] = logits
    flat[:, vocab_size:] = _BANNED
    largest = logits.amax(dim=-1, keepdim=True).double()  # [rows, 1]
    scale = torch.tensor(temperatures, dtype=torch.float64).unsqueeze(1)  # [rows, 1]
    flat.sub_(largest)
    if any(temperature != 1.0 for temperature in temperatures):
        flat.div_(scale)
    exponentiate(memory[:size], memory[size:].view(3, PIECE))
    return weights


def fold(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Left folds: inside each block, in the place of the weights, and over the blocks' sums [rows, blocks]."""
    inside = weights.cumsum_(dim=-1)
    return inside, inside[..., -1].cumsum(dim=-1)


def kth_largest(row: Tensor, k: int) -> Tensor:
    """The k-th largest of [n] values, counting equals; k in [1, n]."""
    whole = len(row) // FOLD_BLOCK * FOLD_BLOCK
    if k <= whole // FOLD_BLOCK:
        # k blocks have a value as large as the k-th largest of the blocks' maxima: nothing below it is among the k,
        # so blocks that hold nothing as large are passed over.
        blocks = row[:whole].view(-1, FOLD_BLOCK)
        maxima = blocks.amax(dim=-1)  # [blocks]
        bound = maxima.topk(k, sorted=False).values.amin()
        row = torch.cat((blocks[maxima >= bound].flatten(), row[whole:]))
    return row.topk(k, sorted=False).values.amin()


def _keep_top_k(weights: Tensor, logits: Tensor, top_k: int) -> None:
    weights[: len(logits)].masked_fill_(logits < kth_largest(logits, top_k), 0.0)


def _keep_top_p(weights: Tensor, top_p: float) -> None:
    total = float(fold(weights.view(1, -1, FOLD_BLOCK).clone())[1][0, -1])
    # Weights below this share of the rest sum to less than the rest, so none of them is needed to reach top_p.
    floor = (1.0 - top_p) * total / len(weights)
    values = weights.numpy()
    candidates = values[values >= floor]
    candidates.sort()  # numpy sorts a row's candidates some 20 times faster than torch
    largest_first = torch.from_numpy(candidates[::-1].copy())
    sums = largest_first.cumsum(dim=0)
    last = int(torch.searchsorted(sums, top_p * total))
    least = largest_first[min(last, len(sums) - 1)]
    weights.masked_fill_(weights < least, 0.0)


def _first_above(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds u x total, for each row."""
    inside, over_blocks = fold(weights)
    totals = over_blocks[:, -1:]  # [rows, 1]
    assert bool(totals.isfinite().all()), "logits are not finite"
    threshold = uniforms.unsqueeze(1) * totals  # [rows, 1]
    block = torch.searchsorted(over_blocks, threshold, right=True)  # [rows, 1]
    before = torch.where(block > 0, over_blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    sums = before + inside[torch.arange(len(weights)), block[:, 0]]  # [rows, FOLD_BLOCK]
    place = torch.searchsorted(sums, threshold, right=True)  # [rows, 1]
    return (block * FOLD_BLOCK + place)[:, 0]


# ---------------------------------------------------------------- log-probabilities


def token_logprobs(
    logits: Tensor,
    rows: Sequence[int],
    token_ids: Sequence[int],
    num_top: Sequence[int],
    workspace: Workspace,
) -> list[tuple[float, int, list[int], list[float]]]:
    """Of some rows of logits [rows, vocab]: what `row_logprobs` says of each."""
    answers = []
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        own = logits[torch.tensor(rows[chunk])]  # [rows of the chunk, vocab]
        normalisers = log_normalisers(own, workspace).tolist()
        assert all(map(math.isfinite, normalisers)), "logits are not finite"
        asked = zip(own, normalisers, token_ids[chunk], num_top[chunk], strict=True)
        answers += [row_logprobs(*each) for each in asked]
    return answers


def log_normalisers(logits: Tensor, workspace: Workspace) -> Tensor:
    """log(sum(exp(logits))) of each row, float64 [rows], by the same fold as sampling."""
    _, over_blocks = fold(to_weights(logits, [1.0] * len(logits), workspace))
    return logits.amax(dim=-1).double() + over_blocks[:, -1].log()


def row_logprobs(
    row: Tensor, normaliser: float, token_id: int, num_top: int
) -> tuple[float, int, list[int], list[float]]:
    """Of a row [vocab]: the log-probability of an id, its rank, and the best ids with theirs.

    The rank counts strictly larger logits (1 is best); equals are listed by ascending id.
    """
    chosen = row[token_id]
    rank = 1 + int((row > chosen).sum())
    top_token_ids: list[int] = []
    if num_top:
        least = kth_largest(row, min(num_top, len(row)))
        candidates = (row >= least).nonzero()[
            :, 0
        ]  # ascending ids, equals of the last one included
        order = row[candidates].sort(descending=True, stable=True).indices[:num_top]
        top_token_ids = candidates[order].tolist()
    tops = [float(row[token_id]) - normaliser for token_id in top_token_ids]
    return float(chosen) - normaliser, rank, top_token_ids, tops
