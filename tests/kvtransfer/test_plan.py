"""Plans against a plain gather and scatter, slab by slab."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import LayoutMismatch
from core.ids import BlockId
from core.kv_layout import KV_DTYPES, GroupKind, KVGroup, KVLayout, SlotFormat, can_convert
from kvtransfer.plan import build_plan

NUM_BLOCKS = 6


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        window = draw(st.sampled_from([None, 8]))
        groups.append(
            KVGroup(
                kind=GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION,
                layers=tuple(range(draw(st.integers(1, 4)))),
                num_kv_heads=draw(st.integers(1, 3)),
                slot=SlotFormat.of(draw(st.sampled_from(sorted(KV_DTYPES))), 2),
                window=window,
            )
        )
    return KVLayout(draw(st.sampled_from([2, 4])), tuple(groups))


def slabs(layout: KVLayout, group: int, first: int, count: int) -> list[tuple[int, int]]:
    """(offset, length) of each slab of a layer range, by walking layers and heads one at a time."""
    shape = layout.groups[group]
    slab_bytes = shape.slab_bytes(layout.block_size)
    return [
        ((layer * shape.num_kv_heads + head) * slab_bytes, slab_bytes)
        for layer in range(first, first + count)
        for head in range(shape.num_kv_heads)
    ]


@given(layouts(), st.data())
def test_runs_carry_what_gather_and_scatter_carry(layout: KVLayout, data: st.DataObject) -> None:
    rng = random.Random(0)
    size = layout.block_bytes
    source = rng.randbytes(NUM_BLOCKS * size)
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    num_layers = len(layout.groups[group].layers)
    first = data.draw(st.integers(0, num_layers - 1))
    count = data.draw(st.integers(1, num_layers - first))
    sources = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS))
    destinations = data.draw(st.permutations(range(NUM_BLOCKS)))[: len(sources)]
    pairs = [(BlockId(s), BlockId(d)) for s, d in zip(sources, destinations, strict=True)]

    expected = bytearray(NUM_BLOCKS * size)
    for s, d in pairs:
        gathered = [
            source[s * size + offset : s * size + offset + length]
            for offset, length in slabs(layout, group, first, count)
        ]
        for (offset, length), slab in zip(
            slabs(layout, group, first, count), gathered, strict=True
        ):
            expected[d * size + offset : d * size + offset + length] = slab

    pool = bytearray(NUM_BLOCKS * size)
    for run in build_plan(layout, layout).runs(group, pairs, first, count):
        start, target = run.source_offset_bytes, run.destination_offset_bytes
        pool[target : target + run.num_bytes] = source[start : start + run.num_bytes]
    assert pool == expected


@given(layouts(), layouts())
def test_a_plan_exists_exactly_when_the_layouts_convert(a: KVLayout, b: KVLayout) -> None:
    if can_convert(a, b):
        assert build_plan(a, b).destination == b
    else:
        with pytest.raises(LayoutMismatch):
            build_plan(a, b)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"block_size": 8}, ("block size", "source 4", "destination 8")),
        ({"tensor_ranks": 2}, ("tensor ranks", "source 1", "destination 2")),
        ({"pipeline_ranks": 3}, ("pipeline ranks", "source 1", "destination 3")),
    ],
)
def test_a_mismatch_names_both_values(change: dict[str, Any], values: tuple[str, ...]) -> None:
    group = KVGroup(GroupKind.FULL_ATTENTION, (0,), 1, SlotFormat("plain", "float32", 2))
    ours = KVLayout(4, (group,))
    with pytest.raises(LayoutMismatch) as caught:
        build_plan(ours, replace(ours, **change))
    assert all(value in caught.value.message for value in values)
