"""Coverage against a plain set of (group, position, layer, slot)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.coverage import Coverage

NUM_LAYERS = (5, 3)
BLOCK_SIZE = 4

needs = st.tuples(
    *[
        st.dictionaries(st.integers(0, 4), st.integers(1, BLOCK_SIZE), max_size=4)
        for _ in NUM_LAYERS
    ]
)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    group = draw(st.integers(0, len(NUM_LAYERS) - 1))
    first = draw(st.integers(0, NUM_LAYERS[group] - 1))
    count = draw(st.integers(1, NUM_LAYERS[group] - first))
    return group, draw(st.integers(0, 5)), first, count, draw(st.integers(1, BLOCK_SIZE))


def cells(
    needed: tuple[dict[int, int], ...],
    group: int,
    position: int,
    first: int,
    count: int,
    slots: int,
) -> set[tuple[int, int, int, int]]:
    """The needed cells of a range, one by one."""
    return {
        (group, position, layer, slot)
        for layer in range(first, first + count)
        for slot in range(min(slots, needed[group].get(position, 0)))
    }


@given(needs, st.lists(ranges(), max_size=30))
def test_equals_a_set_of_cells(
    needed: tuple[dict[int, int], ...], runs: list[tuple[int, int, int, int, int]]
) -> None:
    coverage = Coverage(needed, NUM_LAYERS)
    lacking: set[tuple[int, int, int, int]] = set()
    for group, positions in enumerate(needed):
        for position, slots in positions.items():
            lacking |= cells(needed, group, position, 0, NUM_LAYERS[group], slots)
    for run in runs:
        group, position = run[:2]
        new = cells(needed, *run) & lacking
        parts = coverage.lacking_layers(*run)
        layers = [layer for first, count in parts for layer in range(first, first + count)]
        assert layers == sorted({layer for _, _, layer, _ in new})
        assert all(count > 0 for _, count in parts)
        assert coverage.admit(*run) is bool(new)
        assert not coverage.lacking_layers(*run)
        assert coverage.admit(*run) is False
        lacking -= new
        assert coverage.num_lacking == len(lacking)
        assert coverage.is_complete is (not lacking)


NUM_SHARES = (2, 3)

Cell = tuple[int, int, int, int, int]


@st.composite
def shared_ranges(draw: st.DrawFn) -> tuple[int, int, int, int, int, int, int]:
    """Any slots of some layers of one share."""
    group, position, first, count, end_slot = draw(ranges())
    first_slot = draw(st.integers(0, end_slot - 1))
    return (group, position, first, count, end_slot, first_slot,
            draw(st.integers(0, NUM_SHARES[group] - 1)))  # fmt: skip


def cells_of(
    group: int, position: int, first: int, count: int, end_slot: int, first_slot: int, share: int
) -> set[Cell]:
    """The cells of a range, one by one, needed or not."""
    return {
        (group, position, share, layer, slot)
        for layer in range(first, first + count)
        for slot in range(first_slot, end_slot)
    }


@given(needs, st.lists(shared_ranges(), max_size=60))
def test_slots_and_shares_in_any_order_equal_a_set_of_cells(
    needed: tuple[dict[int, int], ...], runs: list[tuple[int, int, int, int, int, int, int]]
) -> None:
    coverage = Coverage(needed, NUM_LAYERS, NUM_SHARES)
    wanted: dict[tuple[int, int], set[Cell]] = {
        (group, position): set().union(
            *(
                cells_of(group, position, 0, NUM_LAYERS[group], slots, 0, share)
                for share in range(NUM_SHARES[group])
            )
        )
        for group, positions in enumerate(needed)
        for position, slots in positions.items()
    }
    lacking = set().union(*wanted.values())
    for run in runs:
        new = cells_of(*run) & lacking
        parts = coverage.lacking_layers(*run)
        layers = [layer for first, count in parts for layer in range(first, first + count)]
        assert layers == sorted({cell[3] for cell in new})
        assert coverage.admit(*run) is bool(new)
        assert not coverage.lacking_layers(*run)
        assert coverage.admit(*run) is False
        lacking -= new
        assert coverage.num_lacking == len(lacking)
        assert coverage.is_complete is (not lacking)
        for place, block in wanted.items():
            assert coverage.is_block_whole(*place) is (not block & lacking)


def test_a_block_filled_from_its_end_by_two_ranks_is_whole_with_the_last_of_them() -> None:
    coverage = Coverage([{0: 4}], [2], [2])
    for share in (1, 0):
        for first_slot, end_slot in ((3, 4), (0, 1), (1, 3)):
            assert not coverage.is_block_whole(0, 0)
            assert coverage.admit(0, 0, 0, 2, end_slot, first_slot, share)
    assert coverage.is_block_whole(0, 0)
    assert coverage.is_complete


def test_the_partly_filled_last_block_is_complete_with_its_valid_slots() -> None:
    coverage = Coverage([{0: 4, 1: 1}], [2])
    assert coverage.admit(0, 0, 0, 2, 4)
    assert coverage.num_lacking == 2
    assert coverage.admit(0, 1, 0, 2, 1)
    assert coverage.is_complete


def test_fewer_slots_than_needed_leave_the_layer_lacking() -> None:
    coverage = Coverage([{0: 3}], [2])
    assert coverage.admit(0, 0, 0, 2, 2)
    assert coverage.lacking_layers(0, 0, 0, 2, 3) == [(0, 2)]
    assert coverage.admit(0, 0, 0, 1, 4)
    assert coverage.lacking_layers(0, 0, 0, 2, 4) == [(1, 1)]


def test_nothing_needed_is_complete() -> None:
    assert Coverage([{}, {}], [2, 2]).is_complete


@given(needs, st.integers(0, len(NUM_LAYERS) - 1), st.data())
def test_several_whole_blocks_at_once_are_those_blocks_in_turn(
    needed: tuple[dict[int, int], ...], group: int, data: st.DataObject
) -> None:
    lacking = [position for position, num_slots in needed[group].items() if num_slots]
    if not lacking:
        return
    positions = data.draw(st.lists(st.sampled_from(lacking), min_size=1, unique=True))
    slots = [needed[group][position] for position in positions]
    count = NUM_LAYERS[group]
    together, in_turn = Coverage(needed, NUM_LAYERS), Coverage(needed, NUM_LAYERS)
    assert together.lacks_all(group, positions, 0, count)
    assert together.admit_all(group, positions, 0, count, slots) == [True] * len(positions)
    for position, end in zip(positions, slots, strict=True):
        assert in_turn.admit(group, position, 0, count, end)
        for coverage in (together, in_turn):
            assert coverage.is_block_whole(group, position)
            assert not coverage.lacking_layers(group, position, 0, count, end)
            assert not coverage.lacks_all(group, [position], 0, 1)
            assert not coverage.admit(group, position, 0, count, end), "a second time adds nothing"
    assert together.num_lacking == in_turn.num_lacking


@given(needs, st.lists(ranges(), max_size=8), ranges(), st.data())
def test_several_ranges_at_once_are_those_ranges_in_turn(
    needed: tuple[dict[int, int], ...],
    before: list[tuple[int, int, int, int, int]],
    layers: tuple[int, int, int, int, int],
    data: st.DataObject,
) -> None:
    together, in_turn = Coverage(needed, NUM_LAYERS), Coverage(needed, NUM_LAYERS)
    for run in before:
        assert together.admit(*run) == in_turn.admit(*run)
    group, _, first, count, _ = layers
    positions = data.draw(st.lists(st.integers(0, 5), min_size=1, unique=True))
    slots = data.draw(
        st.lists(st.integers(1, BLOCK_SIZE), min_size=len(positions), max_size=len(positions))
    )
    lacking = [
        in_turn.lacking_layers(group, p, first, count, end)
        for p, end in zip(positions, slots, strict=True)
    ]
    assert together.lacks_all(group, positions, first, count) <= all(lacking)
    if together.lacks_all(group, positions, first, count):
        whole = together.admit_all(group, positions, first, count, slots)
        for p, end, is_whole in zip(positions, slots, whole, strict=True):
            assert in_turn.admit(group, p, first, count, end)
            assert in_turn.is_block_whole(group, p) == is_whole
    assert together.num_lacking == in_turn.num_lacking
    assert together.is_complete == in_turn.is_complete


def test_what_is_partly_covered_is_not_wholly_lacking() -> None:
    coverage = Coverage([{0: 4, 1: 4}], [3])
    assert coverage.lacks_all(0, [0, 1], 0, 3)
    assert not coverage.lacks_all(0, [0, 2], 0, 3)
    coverage.admit(0, 1, 2, 1, 1)
    assert not coverage.lacks_all(0, [0, 1], 0, 3)
    assert coverage.lacks_all(0, [0, 1], 0, 2)
