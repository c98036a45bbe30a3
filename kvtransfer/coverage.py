"""Which slots of which layers of a session's blocks have arrived.

The unit is one layer of one block, of which the first `valid_slots` slots count. A range is admitted
once; "complete" is a fact that follows from what was admitted, never a message. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Coverage:
    """What one session attempt lacks, and how much of it is there.

    needed: for each KV group, block position -> slots that the session needs there.
    num_layers: layers of each KV group.
    """

    def __init__(self, needed: Sequence[Mapping[int, int]], num_layers: Sequence[int]) -> None:
        assert len(needed) == len(num_layers), "coverage: one map of positions a group"
        self._needed = [dict(positions) for positions in needed]
        self._num_layers = list(num_layers)
        # (group, position) -> slots covered in each layer, made at the first admission
        self._covered: dict[tuple[int, int], list[int]] = {}
        self._num_lacking = sum(
            sum(positions.values()) * layers
            for positions, layers in zip(self._needed, num_layers, strict=True)
        )

    @property
    def num_lacking(self) -> int:
        """(slot, layer) cells that are still to come."""
        return self._num_lacking

    @property
    def is_complete(self) -> bool:
        """Whether every needed slot of every layer is there."""
        return self._num_lacking == 0

    def is_block_whole(self, group: int, position: int) -> bool:
        """Whether every needed slot of every layer of one block is there."""
        covered = self._covered.get((group, position))
        return covered is not None and min(covered) >= self._needed[group][position]

    def lacking_layers(
        self, group: int, position: int, first_layer: int, num_layers: int, valid_slots: int
    ) -> list[tuple[int, int]]:
        """The parts of a run that would add something, as `(first layer, count)`, ascending.

        Empty when coverage has it all, or the session does not need the block.
        """
        needed = min(valid_slots, self._needed[group].get(position, 0))
        covered = self._covered.get((group, position))
        if needed == 0:
            return []
        if covered is None:
            return [(first_layer, num_layers)]
        cells = covered[first_layer : first_layer + num_layers]
        if max(cells) < needed:
            return [(first_layer, num_layers)]
        return [] if min(cells) >= needed else _stretches_below(cells, needed, first_layer)

    def admit(
        self, group: int, position: int, first_layer: int, num_layers: int, valid_slots: int
    ) -> bool:
        """Count a run whose bytes are in place and verified; whether it added anything."""
        needed = min(valid_slots, self._needed[group].get(position, 0))
        if needed == 0:
            return False
        covered = self._covered.get((group, position))
        if covered is None:
            covered = self._covered[group, position] = [0] * self._num_layers[group]
        end_layer = first_layer + num_layers
        cells = covered[first_layer:end_layer]
        num_added = sum(needed - cell for cell in cells if cell < needed)
        covered[first_layer:end_layer] = [max(cell, needed) for cell in cells]
        self._num_lacking -= num_added
        return num_added > 0


def _stretches_below(cells: Sequence[int], limit: int, first: int) -> list[tuple[int, int]]:
    """`(index + first, count)` of each unbroken stretch of cells below the limit."""
    stretches: list[tuple[int, int]] = []
    for index, cell in enumerate(cells, first):
        if cell >= limit:
            continue
        if stretches and sum(stretches[-1]) == index:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1)
        else:
            stretches.append((index, 1))
    return stretches
