"""Which rows of a step go to which programs of the attention kernel. Host arithmetic only: no tensors.

Sequences with many rows (prefill) are cut into tiles of rows, each folded over all it sees by one program a KV head.
Sequences with few rows (decode) are one tile, and are cut along their positions instead, so that a long context keeps
many programs busy; the parts are merged in order. Both kinds stand in one plan.

How long a part is follows from the step and the card. With `split_tokens` every row takes the second way with parts
of that many positions, counted from 0, and one tile size: then a row's bits do not depend on the rows beside it, on
chunks, or on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from kernels.triton.tables import AttentionTile

MIN_SPLIT_TOKENS = 256
"""Positions that a part has at least: below, merging costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan depends on besides the step.

    num_programs: programs that keep the card busy, which the length of parts is chosen for.
    whole_tile, split_tile: tiles of whole and of split work.
    """

    num_kv_heads: int
    group_size: int
    window: int | None
    split_tokens: int | None
    num_programs: int
    whole_tile: AttentionTile
    split_tile: AttentionTile

    def first_seen(self, position: int) -> int:
        """The first position that a row at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(slots=True)
class Plan:
    """Flat fields of work items and merges, in the order of `attention_kernel` and `merging`.

    whole, split: items of WORK_FIELDS numbers. merges: rows of 4 numbers. num_partials: rows of the parts' outputs.
    """

    whole: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    merges: list[int] = field(default_factory=list)
    num_partials: int = 0


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows `[first_row, first_row + num_rows)` of the batch, positions from `position`, seeing `[start, end)`."""

    sequence: int
    first_row: int
    position: int
    num_rows: int
    start: int
    end: int


def make_plan(query_start: tuple[int, ...], seq_lens: tuple[int, ...], shape: Shape) -> Plan:
    """The plan of one step."""
    few = max(1, shape.split_tile.block_rows // shape.group_size)
    many = max(1, shape.whole_tile.block_rows // shape.group_size)
    whole: list[Tile] = []
    split: list[Tile] = []
    for sequence, (first, end) in enumerate(pairwise(query_start)):
        is_split = shape.split_tokens is not None or end - first <= few
        tiles = _tiles(sequence, first, end, seq_lens[sequence], few if is_split else many, shape)
        (split if is_split else whole).extend(tiles)
    plan = Plan()
    # The longest first: what starts last should be short.
    for tile in sorted(whole, key=lambda t: t.start - t.end):
        plan.whole += [*_item(tile, tile.start, tile.end), tile.first_row]
    length = shape.split_tokens or _part_length(split, shape)
    for tile in split:
        _add_parts(plan, tile, length)
    return plan


def _tiles(
    sequence: int, first: int, end: int, seq_len: int, rows_a_tile: int, shape: Shape
) -> Iterator[Tile]:
    """Rows `[first, end)` of a sequence in tiles; the last row stands at `seq_len - 1`."""
    for row in range(first, end, rows_a_tile):
        num_rows = min(rows_a_tile, end - row)
        position = seq_len - (end - row)
        start = shape.first_seen(position)
        yield Tile(sequence, row, position, num_rows, start, position + num_rows)


def _part_length(tiles: list[Tile], shape: Shape) -> int:
    """Positions of a part, such that all parts together keep the card busy."""
    block = shape.split_tile.block_positions
    num_positions = sum(tile.end - tile.start for tile in tiles) * shape.num_kv_heads
    wanted = max(MIN_SPLIT_TOKENS, -(-num_positions // shape.num_programs))
    return -(-wanted // block) * block


def _add_parts(plan: Plan, tile: Tile, length: int) -> None:
    """The parts of one tile, and how its rows are merged; a part's rows lie behind the part's before."""
    cuts = range(tile.start // length * length, tile.end, length)
    base = plan.num_partials
    for number, cut in enumerate(cuts):
        start, end = max(cut, tile.start), min(cut + length, tile.end)
        plan.split += [*_item(tile, start, end), base + number * tile.num_rows]
    for row in range(tile.num_rows):
        plan.merges += [tile.first_row + row, base + row, tile.num_rows, len(cuts)]
    plan.num_partials += len(cuts) * tile.num_rows


def _item(tile: Tile, start: int, end: int) -> tuple[int, ...]:
    return tile.sequence, tile.first_row, tile.position, tile.num_rows, start, end
