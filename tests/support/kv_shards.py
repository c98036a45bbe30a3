"""Logical KV in the pools of a worker's ranks, laid out by walking it: what plans are held against.

Nothing here asks a layout where something lies; it only reads the layout's numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from core.kv_layout import KVGroup, KVLayout

Bytes = npt.NDArray[np.uint8]
LogicalKV = list[list[Bytes]]
"""For each group and each part of a slot (K, V, their scales), bytes `[token, layer, head, bytes of the part]`."""


def part_widths(group: KVGroup) -> list[int]:
    """Bytes that one slot has in each part of a slab."""
    row_bytes = group.slot.head_dim * group.slot.element_bytes
    return [row_bytes, row_bytes, *([4, 4] if group.slot.has_scales else [])]


def random_kv(layout: KVLayout, num_tokens: int, rng: np.random.Generator) -> LogicalKV:
    """Random bytes for every part of every slot."""
    return [
        [
            rng.integers(
                0, 256, (num_tokens, len(group.layers), group.num_kv_heads, width), np.uint8
            )
            for width in part_widths(group)
        ]
        for group in layout.groups
    ]


def rank_heads(layout: KVLayout, group: KVGroup, rank: int) -> list[int]:
    """The model's heads that a rank holds."""
    heads, ranks = group.num_kv_heads, layout.tensor_ranks
    if ranks <= heads:
        return [int(head) for head in np.split(np.arange(heads), ranks)[rank % ranks]]
    return [int(np.repeat(np.arange(heads), ranks // heads)[rank % ranks])]


def rank_layers(layout: KVLayout, group: KVGroup, rank: int) -> list[int]:
    """Places in the group that a rank holds: vLLM's division of the model's layers into stages."""
    num_layers = 1 + max(layer for other in layout.groups for layer in other.layers)
    stages = [num_layers // layout.pipeline_ranks] * layout.pipeline_ranks
    for stage in range(num_layers % layout.pipeline_ranks):
        stages[-2 - stage] += 1
    ends = [0, *itertools.accumulate(stages)]
    stage = rank // layout.tensor_ranks
    return [i for i, layer in enumerate(group.layers) if ends[stage] <= layer < ends[stage + 1]]


def block_bytes(layout: KVLayout, rank: int) -> int:
    """Bytes of a block in a rank's pool."""
    return max(
        len(rank_layers(layout, group, rank))
        * len(rank_heads(layout, group, rank))
        * sum(part_widths(group))
        * layout.block_size
        for group in layout.groups
    )


def scatter(
    pool: Bytes,
    layout: KVLayout,
    rank: int,
    kv: LogicalKV,
    tables: Sequence[Sequence[int]],
    tokens: range,
) -> None:
    """Put a rank's part of the tokens of each group into the pool `[num_blocks, block_bytes]`."""
    for group, table, parts in zip(layout.groups, tables, kv, strict=True):
        for offset, layer, head, part, width in _part_places(layout, group, rank):
            for position, first, end in _in_blocks(tokens, layout.block_size):
                start = offset + first * width
                token = position * layout.block_size
                values = parts[part][token + first : token + end, layer, head]
                pool[table[position], start : start + values.size] = values.ravel()


def _part_places(
    layout: KVLayout, group: KVGroup, rank: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """(offset in the block, layer, head, part, bytes a slot) of each run of one part, in order."""
    offset = 0
    for layer in rank_layers(layout, group, rank):
        for head in rank_heads(layout, group, rank):
            for part, width in enumerate(part_widths(group)):
                yield offset, layer, head, part, width
                offset += width * layout.block_size


def _in_blocks(tokens: range, block_size: int) -> Iterator[tuple[int, int, int]]:
    """(position, first slot, end slot) of tokens in each block."""
    for position in range(tokens.start // block_size, -(-tokens.stop // block_size)):
        start = position * block_size
        yield position, max(tokens.start - start, 0), min(tokens.stop - start, block_size)
