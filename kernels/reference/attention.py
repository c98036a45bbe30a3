"""Attention over the paged pool.

A step's sequences fall into pieces: a sequence with several rows is a piece of its own, sequences with one row are
gathered together, padded to a common length, with neighbours of like length so that padding stays small. A piece's
blocks, masks and rows are the same in every layer and computed once a step. KV is gathered into dense memory first;
positions that a row must not see are masked, and gathered slots that no row may see are zeroed, so that what an
unwritten slot holds (it may be NaN) cannot reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kv_view import KVView
from kernels.reference.kv_formats import dequantize
from kernels.step import StepMetadata

_PADDING_LIMIT = 1.5  # a group's common length over its shortest member's
_PADDING_SLACK_TOKENS = 64  # always allowed, so that short sequences share one group


@dataclass(frozen=True, slots=True)
class Piece:
    """Sequences attended together: `n` of them with `rows` rows each, over `length` gathered positions.

    row_numbers: `[n * rows]` rows of the flat batch, or None where rows are `[first_row, first_row + n * rows)`.
    blocks: `[n * num_blocks]` physical blocks to gather.
    mask: `[n, 1, rows, length]` float, 0 where seen and -inf elsewhere.
    unseen: positions of the gathered `[n * length]` that hold nothing valid.
    """

    num_sequences: int
    num_rows: int
    first_row: int
    row_numbers: Tensor | None
    blocks: Tensor
    mask: Tensor
    unseen: Tensor


def paged_attention(
    query: Tensor,
    layer: KVView,
    metadata: StepMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `kernels.ops.paged_attention`."""
    block_size = layer.block_size
    key = ("attention", block_size, window, query.dtype)
    pieces = metadata.once(key, lambda: _plan(metadata, block_size, window, query.dtype))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for piece in pieces:
        _attend(piece, query, layer, output, scale, soft_cap, sinks)
    return output


def _attend(
    piece: Piece,
    query: Tensor,
    layer: KVView,
    output: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Write the rows of one piece into `output`."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = layer.num_kv_heads
    count, rows = piece.num_sequences, piece.num_rows
    rows_end = piece.first_row + count * rows
    if piece.row_numbers is None:
        own = query[piece.first_row : rows_end]
    else:
        own = query.index_select(0, piece.row_numbers)
    keys, values = _gather(piece, layer, query.dtype)  # [n, Hkv, length, D] each
    own = own.view(count, rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, -1, 1)  # [Hkv, heads a KV head, 1]
    if rows == 1:
        # The query heads of a KV head are rows of one product: [n, Hkv, heads a KV head, D].
        result = _attention(own.squeeze(1), keys, values, piece.mask, scale, soft_cap, sinks)
        result = result.reshape(count, num_heads, head_dim)
    else:
        # One sequence: its KV heads take the batch's place, [Hkv, heads a KV head, rows, D].
        own = own[0].permute(1, 2, 0, 3)
        keys = keys[0].unsqueeze(1).expand(-1, own.shape[1], -1, -1)
        values = values[0].unsqueeze(1).expand(-1, own.shape[1], -1, -1)
        sinks = None if sinks is None else sinks.unsqueeze(2)
        result = _attention(own, keys, values, piece.mask, scale, soft_cap, sinks)
        result = result.permute(2, 0, 1, 3).reshape(rows, num_heads, head_dim)
    if piece.row_numbers is None:
        output[piece.first_row : rows_end] = result
    else:
        output.index_copy_(0, piece.row_numbers, result)


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(cap(scale * query @ keys^T) + mask, and the sinks) @ values over the last two dimensions.

    sinks: one logit a row, of a shape that broadcasts to `[..., rows, 1]`.
    """
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = torch.matmul(query.float(), keys.float().transpose(-1, -2)).mul_(scale)
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores = scores.add_(mask)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]  # what a sink takes has no value
    return torch.matmul(weights, values.float()).to(query.dtype)


def _gather(piece: Piece, layer: KVView, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of a piece, `[n, Hkv, length, D]` each, strided over one gathered copy."""
    num_kv_heads, head_dim = layer.num_kv_heads, layer.head_dim
    by_head = layer.values.permute(1, 2, 0, 3, 4)  # [Hkv, 2, num_blocks, block_size, D]
    values = by_head.index_select(2, piece.blocks)
    scales = None
    if layer.scales is not None:
        scales = layer.scales.permute(1, 2, 0, 3).index_select(2, piece.blocks)
    gathered = dequantize(values, scales, dtype).view(num_kv_heads, 2, -1, head_dim)
    if piece.unseen.numel():
        gathered.index_fill_(2, piece.unseen, 0.0)
    gathered = gathered.view(num_kv_heads, 2, piece.num_sequences, -1, head_dim)
    return gathered[:, 0].transpose(0, 1), gathered[:, 1].transpose(0, 1)


def _plan(
    metadata: StepMetadata, block_size: int, window: int | None, dtype: torch.dtype
) -> list[Piece]:
    """Cut a step into pieces."""
    starts, lengths = metadata.query_start, metadata.seq_lens
    num_rows = [end - start for start, end in pairwise(starts)]
    longer = [s for s, rows in enumerate(num_rows) if rows > 1]
    single = [s for s, rows in enumerate(num_rows) if rows == 1]
    groups = [[s] for s in longer] + _group_by_length(single, lengths, window)
    return [
        _plan_piece(metadata, group, num_rows[group[0]], block_size, window, dtype)
        for group in groups
    ]


def _group_by_length(
    sequences: list[int], lengths: tuple[int, ...], window: int | None
) -> list[list[int]]:
    """Sequences of like length together, longest first within a group's limit of padding."""

    def seen(sequence: int) -> int:
        return lengths[sequence] if window is None else min(window, lengths[sequence])

    groups: list[list[int]] = []
    for sequence in sorted(sequences, key=lambda s: (-seen(s), s)):
        if groups:
            longest = seen(groups[-1][0])
            if longest <= _PADDING_LIMIT * seen(sequence) + _PADDING_SLACK_TOKENS:
                groups[-1].append(sequence)
                continue
        groups.append([sequence])
    return groups


def _plan_piece(
    metadata: StepMetadata,
    group: list[int],
    num_rows: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> Piece:
    """Blocks, mask and rows of sequences that have `num_rows` rows each."""
    lengths = torch.tensor([metadata.seq_lens[s] for s in group])  # [n]
    first_seen = torch.zeros_like(lengths)
    if window is not None:
        first_seen = (lengths - num_rows - window + 1).clamp_(min=0)
    first_block = first_seen // block_size  # [n]
    num_blocks = int(((lengths - 1) // block_size - first_block).max()) + 1
    columns = first_block[:, None] + torch.arange(num_blocks)  # [n, num_blocks]
    last_column = (lengths[:, None] - 1) // block_size
    tables = metadata.block_tables[torch.tensor(group)]
    blocks = tables.gather(1, torch.minimum(columns, last_column)).flatten()

    # positions of what is gathered, and of the rows that look at it
    length = num_blocks * block_size
    seen = first_block[:, None] * block_size + torch.arange(length)  # [n, length]
    own = (lengths[:, None] - num_rows + torch.arange(num_rows))[:, :, None]  # [n, rows, 1]
    visible = seen[:, None, :] <= own  # [n, rows, length]
    if window is not None:
        visible &= seen[:, None, :] > own - window
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    is_unseen = (seen >= lengths[:, None]) | (seen < first_seen[:, None])
    unseen = is_unseen.flatten().nonzero().squeeze(1)

    first_row = metadata.query_start[group[0]]
    rows = [metadata.query_start[s] for s in group]
    in_order = rows == list(range(first_row, first_row + len(rows)))
    return Piece(
        num_sequences=len(group),
        num_rows=num_rows,
        first_row=first_row,
        row_numbers=None if in_order else torch.tensor(rows),
        blocks=blocks,
        mask=mask.unsqueeze(1),
        unseen=unseen,
    )
