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
        # of each group: position -> bit set of needed slots, none of them empty
        self._needed = [
            {
                position: (1 << num_slots) - 1
                for position, num_slots in positions.items()
                if num_slots
            }
            for positions in needed
        ]
        self._num_layers = list(num_layers)
        self._num_rows = [a * b for a, b in zip(shares, num_layers, strict=True)]
        # of each group: position -> bit set of covered slots for each layer of each share, from the first admission on
        # until the block is whole
        self._covered: list[dict[int, list[int]]] = [{} for _ in needed]
        self._whole: list[set[int]] = [set() for _ in needed]
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
        return position in self._whole[group]

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
        slots = self._needed[group].get(position, 0) & _bits(first_slot, end_slot)
        covered = self._covered[group].get(position)
        if slots == 0 or position in self._whole[group]:
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
        needed = self._needed[group].get(position, 0)
        slots = needed & _bits(first_slot, end_slot)
        if slots == 0 or position in self._whole[group]:
            return False
        covered = self._covered[group].get(position)
        if covered is None:
            covered = self._covered[group][position] = [0] * self._num_rows[group]
        first_row = share * self._num_layers[group] + first_layer
        end_row = first_row + num_layers
        rows = covered[first_row:end_row]
        num_added = sum([(slots & ~row).bit_count() for row in rows])
        if num_added:
            covered[first_row:end_row] = [row | slots for row in rows]
            self._num_lacking -= num_added
            self._note_whole(group, position, covered, needed)
        return num_added > 0

    def lacks_all(
        self, group: int, positions: Sequence[int], first_layer: int, num_layers: int
    ) -> bool:
        """Whether of these layers of the first share nothing is covered, in blocks of which something is needed."""
        covered = self._covered[group]
        if not self._needed[group].keys() >= set(positions):
            return False
        if not self._whole[group].isdisjoint(positions):
            return False
        if covered.keys().isdisjoint(positions):
            return True
        end_layer = first_layer + num_layers
        return not any(any(covered.get(p, ())[first_layer:end_layer]) for p in positions)

    def admit_all(
        self,
        group: int,
        positions: Sequence[int],
        first_layer: int,
        num_layers: int,
        end_slots: Sequence[int],
    ) -> list[bool]:
        """`admit` each of several ranges, some slots from the first on, that `lacks_all` speaks for; whether each one's
        block is whole now. No block comes twice.
        """
        needed, covered, num_rows = self._needed[group], self._covered[group], self._num_rows[group]
        if num_layers == num_rows and self._are_all_slots(group, positions, end_slots):
            self._whole[group].update(positions)
            self._num_lacking -= sum(end_slots) * num_rows
            return [True] * len(positions)
        end_layer, num_slots, whole = first_layer + num_layers, 0, list[bool]()
        seen: tuple[int, int] | None = None
        for position, end_slot in zip(positions, end_slots, strict=True):
            all_slots = needed[position]
            if seen != (all_slots, end_slot):  # nearly always those of the block before
                seen = (all_slots, end_slot)
                slots = all_slots & ((1 << end_slot) - 1)
                count, added = slots.bit_count(), [slots] * num_layers
                alone = [0] * first_layer + added + [0] * (num_rows - end_layer)
                is_all = slots == all_slots
            rows = covered.get(position)
            if rows is None:
                covered[position] = rows = alone.copy()
            else:
                rows[first_layer:end_layer] = added
            num_slots += count
            whole.append(is_all and self._note_whole(group, position, rows, all_slots))
        self._num_lacking -= num_slots * num_layers
        return whole

    def _are_all_slots(
        self, group: int, positions: Sequence[int], end_slots: Sequence[int]
    ) -> bool:
        """Whether `[0, end)` is in each of the blocks exactly what is needed."""
        needed = map(self._needed[group].__getitem__, positions)
        return list(map(int.bit_length, needed)) == list(end_slots)

    def _note_whole(self, group: int, position: int, rows: list[int], needed: int) -> bool:
        """Whether a block has all slots in all rows; if so it is remembered as whole, and no more."""
        is_whole = rows.count(needed) == len(rows)
        if is_whole:
            del self._covered[group][position]
            self._whole[group].add(position)
        return is_whole


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
