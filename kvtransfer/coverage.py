"""Which slots of which layers of a session's blocks have arrived at one rank.

The unit is one slot of one layer in one share: the heads of a rank come in one share from each source tensor rank
that sends some, in a single one when layouts are equal. A range is some slots of some layers of one block in one
share. Ranges come in any order, and each cell is admitted once; "complete" is a fact that follows from what was
admitted, never a message. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Coverage:
    """What one session attempt lacks, and how much of it is there.

    needed: for each KV group, block position -> slots that the session needs there, the first ones of the block.
    num_layers: layers of each KV group.
    num_shares: shares of each KV group; one everywhere when not given.
    """

    def __init__(
        self,
        needed: Sequence[Mapping[int, int]],
        num_layers: Sequence[int],
        num_shares: Sequence[int] | None = None,
    ) -> None:
        assert len(needed) == len(num_layers), "coverage: one map of positions a group"
        shares = [1] * len(num_layers) if num_shares is None else list(num_shares)
        # (group, position) -> bit set of needed slots
        self._needed = {
            (group, position): (1 << num_slots) - 1
            for group, positions in enumerate(needed)
            for position, num_slots in positions.items()
        }
        self._num_layers = list(num_layers)
        self._num_rows = [a * b for a, b in zip(shares, num_layers, strict=True)]
        # (group, position) -> bit set of covered slots for each layer of each share, made at the first admission
        self._covered: dict[tuple[int, int], list[int]] = {}
        self._num_lacking = sum(
            sum(positions.values()) * num_rows
            for positions, num_rows in zip(needed, self._num_rows, strict=True)
        )

    @property
    def num_lacking(self) -> int:
        """(slot, layer, share) cells that are still to come."""
        return self._num_lacking

    @property
    def is_complete(self) -> bool:
        """Whether every needed slot of every layer of every share is there."""
        return self._num_lacking == 0

    def is_block_whole(self, group: int, position: int) -> bool:
        """Whether every needed slot of every layer of every share of one block is there."""
        covered = self._covered.get((group, position))
        # no set has a slot that is not needed, so the least is whole only where all are
        return covered is not None and min(covered) == self._needed[group, position]

    def lacking_layers(
        self,
        group: int,
        position: int,
        first_layer: int,
        num_layers: int,
        end_slot: int,
        first_slot: int = 0,
        share: int = 0,
    ) -> list[tuple[int, int]]:
        """The parts of a range that would add some slot, as `(first layer, count)`, ascending.

        Empty when coverage has it all, or the session does not need the block.
        """
        slots = self._needed.get((group, position), 0) & _bits(first_slot, end_slot)
        covered = self._covered.get((group, position))
        if slots == 0:
            return []
        if covered is None:
            return [(first_layer, num_layers)]
        first_row = share * self._num_layers[group] + first_layer
        rows = covered[first_row : first_row + num_layers]
        if not any(rows):
            return [(first_layer, num_layers)]
        return _stretches_lacking(rows, slots, first_layer)

    def admit(
        self,
        group: int,
        position: int,
        first_layer: int,
        num_layers: int,
        end_slot: int,
        first_slot: int = 0,
        share: int = 0,
    ) -> bool:
        """Count a range whose bytes are in place and verified; whether it added anything."""
        slots = self._needed.get((group, position), 0) & _bits(first_slot, end_slot)
        if slots == 0:
            return False
        covered = self._covered.get((group, position))
        if covered is None:
            covered = self._covered[group, position] = [0] * self._num_rows[group]
        first_row = share * self._num_layers[group] + first_layer
        end_row = first_row + num_layers
        rows = covered[first_row:end_row]
        num_added = sum([(slots & ~row).bit_count() for row in rows])
        if num_added:
            covered[first_row:end_row] = [row | slots for row in rows]
            self._num_lacking -= num_added
        return num_added > 0

    def lacks_all(
        self,
        group: int,
        positions: Sequence[int],
        first_layer: int,
        num_layers: int,
        end_slots: Sequence[int],
    ) -> bool:
        """Whether of each of these ranges of the first share nothing is covered, and something is needed."""
        needed, covered = self._needed, self._covered
        end_layer = first_layer + num_layers
        for position, end_slot in zip(positions, end_slots, strict=True):
            place = (group, position)
            if not needed.get(place, 0) & ((1 << end_slot) - 1):
                return False
            rows = covered.get(place)
            if rows is not None and any(rows[first_layer:end_layer]):
                return False
        return True

    def admit_all(
        self,
        group: int,
        positions: Sequence[int],
        first_layer: int,
        num_layers: int,
        end_slots: Sequence[int],
    ) -> list[bool]:
        """`admit` each of several ranges that `lacks_all` speaks for; whether each one's block is whole now."""
        is_whole_block = num_layers == self._num_rows[group]
        whole: list[bool] = []
        for position, end_slot in zip(positions, end_slots, strict=True):
            place = (group, position)
            if is_whole_block and place not in self._covered:
                needed = self._needed.get(place, 0)
                slots = needed & ((1 << end_slot) - 1)
                self._covered[place] = [slots] * num_layers
                self._num_lacking -= slots.bit_count() * num_layers
                whole.append(slots == needed)
            else:
                self.admit(group, position, first_layer, num_layers, end_slot)
                whole.append(self.is_block_whole(group, position))
        return whole


def _bits(first: int, end: int) -> int:
    """The bit set of `[first, end)`."""
    return (1 << end) - (1 << first)


def _stretches_lacking(rows: Sequence[int], slots: int, first: int) -> list[tuple[int, int]]:
    """`(index + first, count)` of each unbroken stretch of rows that lack some of the slots."""
    stretches: list[tuple[int, int]] = []
    for index, row in enumerate(rows, first):
        if row & slots == slots:
            continue
        if stretches and sum(stretches[-1]) == index:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1)
        else:
            stretches.append((index, 1))
    return stretches
