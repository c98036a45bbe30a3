"""Which physical blocks hold a sequence's KV: one ordered list of block ids for each KV group."""

from __future__ import annotations

from core.ids import BlockId


class BlockTable:
    """A sequence's blocks by group and position. Owns nothing: references are counted in the BlockPool.

    groups: for each KV group the block ids in order of position; position p holds tokens [p * bs, (p + 1) * bs).
    spares: blocks reserved for this sequence that stand at no position yet; taken before the pool is asked.
    """

    __slots__ = ("groups", "spares")

    def __init__(self, num_groups: int = 1) -> None:
        self.groups: list[list[BlockId]] = [[] for _ in range(num_groups)]
        self.spares: list[BlockId] = []

    def __len__(self) -> int:
        """Positions that have a block, the same in every group."""
        return len(self.groups[0])

    @property
    def num_held_blocks(self) -> int:
        """Blocks that this table holds a reference on, over all groups, spares included."""
        return sum(map(len, self.groups)) + len(self.spares)

    def ids(self, group: int = 0) -> list[BlockId]:
        """The block ids of one group; the live list, to read only."""
        return self.groups[group]

    def append(self, row: list[BlockId]) -> None:
        """Give the next position one block in each group."""
        assert len(row) == len(self.groups), f"{len(row)} blocks for {len(self.groups)} groups"
        for ids, block in zip(self.groups, row, strict=True):
            ids.append(block)

    def cut(self, keep_first: int) -> list[BlockId]:
        """Take the blocks from position `keep_first` on, in every group, and return them tail first."""
        rows = list(zip(*(ids[keep_first:] for ids in self.groups), strict=True))
        for ids in self.groups:
            del ids[keep_first:]
        return [block for row in reversed(rows) for block in row]

    def take_spares(self) -> list[BlockId]:
        """Take all spares."""
        spares, self.spares = self.spares, []
        return spares
