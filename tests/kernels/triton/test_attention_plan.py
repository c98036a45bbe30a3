"""The host's plan of a step: every row's positions once and no others, parts in order, programs enough."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton.attention_plan import MIN_SPLIT_TOKENS, Plan, Shape, make_plan
from kernels.triton.tables import AttentionTile

WHOLE, SPLIT = AttentionTile(128, 64, 8, 3), AttentionTile(16, 64, 4, 3)
steps = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 90)), min_size=1, max_size=5)


some = settings(max_examples=40)


def batched(fields: list[int], width: int) -> Iterator[tuple[int, ...]]:
    """Fields in rows of `width`."""
    assert len(fields) % width == 0
    return zip(*[iter(fields)] * width, strict=True)


def shape(group_size: int = 4, window: int | None = None, split_tokens: int | None = None) -> Shape:
    return Shape(8, group_size, window, split_tokens, 264, WHOLE, SPLIT)


def plan_of(sequences: list[tuple[int, int]], of: Shape) -> tuple[Plan, tuple[int, ...]]:
    starts = [0]
    for _, rows in sequences:
        starts.append(starts[-1] + rows)
    lengths = tuple(before + rows for before, rows in sequences)
    return make_plan(tuple(starts), lengths, of), tuple(starts)


@some
@given(
    steps,
    st.sampled_from([1, 4, 5, 16, 40]),
    st.none() | st.integers(1, 900),
    st.sampled_from([None, 1024]),
)
def test_every_row_sees_its_positions_once(sequences, group_size, window, split_tokens) -> None:
    plan, starts = plan_of(sequences, shape(group_size, window, split_tokens))
    seen: dict[int, list[tuple[int, int]]] = {}
    for item in [*batched(plan.whole, 7), *batched(plan.split, 7)]:
        sequence, first_row, position, num_rows, start, end, _ = item
        before, _ = sequences[sequence]
        assert starts[sequence] <= first_row
        assert first_row + num_rows <= starts[sequence + 1]
        assert position == before + first_row - starts[sequence]
        for row in range(num_rows):
            seen.setdefault(first_row + row, []).append((start, end))
    for sequence, (before, _) in enumerate(sequences):
        for row in range(starts[sequence], starts[sequence + 1]):
            position = before + row - starts[sequence]
            parts = seen.pop(row)
            assert all(end == start for (_, end), (start, _) in pairwise(parts))  # in order, no gap
            first = 0 if window is None else max(0, position - window + 1)
            assert parts[0][0] <= first
            assert parts[-1][1] > position
    assert not seen


@some
@given(steps, st.sampled_from([1, 4, 40]), st.none() | st.integers(1, 900))
def test_merges_name_every_part_in_order(sequences, group_size, window) -> None:
    plan, _ = plan_of(sequences, shape(group_size, window, 1024))
    assert not plan.whole
    written: dict[int, tuple[int, int]] = {}
    for sequence, first_row, _, num_rows, start, _, output in batched(plan.split, 7):
        for row in range(num_rows):
            assert output + row not in written
            written[output + row] = (first_row + row, start)
        assert sequence >= 0
    assert sorted(written) == list(range(plan.num_partials))
    for row, first, step, count in batched(plan.merges, 4):
        parts = [written.pop(first + number * step) for number in range(count)]
        assert {owner for owner, _ in parts} == {row}
        assert [start for _, start in parts] == sorted(start for _, start in parts)
    assert not written


@some
@given(steps, st.none() | st.integers(1, 900))
def test_fixed_parts_begin_at_multiples(sequences, window) -> None:
    plan, _ = plan_of(sequences, shape(window=window, split_tokens=1024))
    for _, _, position, _, start, end, _ in batched(plan.split, 7):
        first = 0 if window is None else max(0, position - window + 1)
        assert start % 1024 == 0 or start == first
        assert end - start <= 1024
        assert start // 1024 == (end - 1) // 1024


def test_long_prompts_start_first() -> None:
    plan, _ = plan_of([(0, 200), (4000, 200)], shape())
    lengths = [end - start for *_, start, end, _ in batched(plan.whole, 7)]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("sequences", "least", "most"),
    [
        ([(8191, 1)], 30, 32),  # one long context is spread, in parts of the least length
        ([(65_535, 1)] * 4, 33, 80),  # 264 programs for 8 KV heads are 33 parts
        ([(1000, 1)] * 256, 256, 512),  # many sequences fill the card without cuts
        ([(10, 1)], 1, 1),
    ],
)
def test_parts_keep_a_card_busy_and_no_more(sequences, least: int, most: int) -> None:
    plan, _ = plan_of(sequences, shape())
    assert least <= len(plan.split) // 7 <= most
    for *_, start, end, _ in batched(plan.split, 7):
        assert end - start <= max(MIN_SPLIT_TOKENS, 65_536 // 8)


def test_decode_and_prefill_stand_in_one_plan() -> None:
    plan, _ = plan_of([(500, 1), (0, 300), (100, 4), (7, 1)], shape())
    assert Counter(item[0] for item in batched(plan.whole, 7)) == {1: 10}
    assert {item[0] for item in batched(plan.split, 7)} == {0, 2, 3}
