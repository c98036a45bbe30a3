"""Plans against a plain gather from the source's ranks and scatter into the destination's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import LayoutMismatch
from core.kv_layout import (
    KV_DTYPES,
    GroupKind,
    KVGroup,
    KVLayout,
    Run,
    SlotFormat,
    can_convert,
)
from kvtransfer.coverage import Coverage
from kvtransfer.plan import Extent, Piece, SlotFormats, TransferPlan, build_plan
from kvtransfer.routes import RankPair
from tests.support.kv_shards import Bytes, block_bytes, random_kv, scatter

POISON = 0xEE
MAX_RANKS = 4


def divides(num_heads: int, num_ranks: int) -> bool:
    return num_heads % num_ranks == 0 or num_ranks % num_heads == 0


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    """Two layouts of one model: any block sizes and ranks that its heads divide over, and KV dtypes where the second
    names one for the wire.
    """
    wire_dtype = draw(st.none() | st.sampled_from(sorted(KV_DTYPES)))
    ranks = st.integers(1, MAX_RANKS)
    tensor_ranks = draw(st.tuples(ranks, ranks))
    pipeline_ranks = draw(st.tuples(ranks, ranks))
    num_heads = [h for h in range(1, 9) if all(divides(h, count) for count in tensor_ranks)]
    dtypes = st.sampled_from(sorted(KV_DTYPES))
    groups: tuple[list[KVGroup], list[KVGroup]] = ([], [])
    for _ in range(draw(st.integers(1, 3))):
        layers = tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=4))))
        window = draw(st.sampled_from([None, 8]))
        kind = GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION
        heads, head_dim = draw(st.sampled_from(num_heads)), draw(st.integers(1, 3))
        source_dtype = draw(dtypes)
        other = source_dtype if wire_dtype is None else draw(st.just(source_dtype) | dtypes)
        for side, dtype in zip(groups, (source_dtype, other), strict=True):
            side.append(KVGroup(kind, layers, heads, SlotFormat.of(dtype, head_dim), window))
    first_size = draw(st.integers(1, 64))
    sizes = (first_size, draw(st.just(first_size) | st.integers(1, 64)))
    source, destination = (
        KVLayout(
            size,
            tuple(side),
            tensor_ranks=tensor_ranks[i],
            pipeline_ranks=pipeline_ranks[i],
            wire_dtype=wire_dtype,
        )
        for i, (size, side) in enumerate(zip(sizes, groups, strict=True))
    )
    return source, destination


@st.composite
def cuts(draw: st.DrawFn, start: int, end: int) -> list[range]:
    """`[start, end)` in a few stretches."""
    inside = st.integers(start, end)
    edges = sorted({start, end, *draw(st.lists(inside, max_size=2))})
    return [range(a, b) for a, b in pairwise(edges)]


@dataclass
class Transfer:
    """A sequence of which the destination lacks its blocks from `first_token` on."""

    plan: TransferPlan
    first_token: int
    num_tokens: int
    extents: list[Extent]
    seed: int

    def pieces(self) -> list[tuple[RankPair, Piece]]:
        return [
            (pair, piece)
            for extent in self.extents
            for pair in self.plan.pairs
            for piece in self.plan.pieces(pair, extent, self.num_tokens)
        ]

    def coverages(self) -> list[Coverage]:
        """What each destination rank lacks."""
        layout = self.plan.destination
        positions = range(self.first_token // layout.block_size, layout.num_blocks(self.num_tokens))
        needed = {position: layout.valid_slots(position, self.num_tokens) for position in positions}
        return [
            Coverage(
                [needed] * len(layout.groups),
                self.plan.num_layers(rank),
                self.plan.num_shares(rank),
            )
            for rank in range(layout.num_ranks)
        ]


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    plan = build_plan(*draw(layout_pairs()))
    size = plan.destination.block_size
    num_tokens = draw(st.integers(1, 70))
    first_token = draw(st.integers(0, (num_tokens - 1) // size)) * size
    extents = [
        Extent(group, layers.start, len(layers), tokens.start, tokens.stop)
        for group, shape in enumerate(plan.source.groups)
        for layers in draw(cuts(0, len(shape.layers)))
        for tokens in draw(cuts(first_token, num_tokens))
    ]
    seed = draw(st.integers(0, 2**32 - 1))
    return Transfer(plan, first_token, num_tokens, draw(st.permutations(extents)), seed)


def random_tables(layout: KVLayout, num_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """For each group the blocks of the sequence, one spare beside them."""
    num_blocks, num_groups = layout.num_blocks(num_tokens), len(layout.groups)
    ids = rng.permutation(num_groups * num_blocks + 1)
    return [list(map(int, ids[i * num_blocks :][:num_blocks])) for i in range(num_groups)]


def empty_pools(layout: KVLayout, tables: list[list[int]]) -> list[Bytes]:
    num_blocks = sum(map(len, tables)) + 1
    return [
        np.full((num_blocks, block_bytes(layout, rank)), POISON, np.uint8)
        for rank in range(layout.num_ranks)
    ]


@given(transfers())
def test_runs_carry_what_gather_and_scatter_carry(transfer: Transfer) -> None:
    """Between pools of one format, so that what is carried can be told."""
    plan, rng = transfer.plan, np.random.default_rng(transfer.seed)
    groups = zip(plan.source.groups, plan.destination.groups, strict=True)
    wire = replace(plan.source, groups=tuple(replace(a, slot=b.slot) for a, b in groups))
    destination = plan.destination
    transfer = replace(transfer, plan=build_plan(wire, destination))
    kv = random_kv(destination, transfer.num_tokens, rng)
    source_tables = random_tables(wire, transfer.num_tokens, rng)
    tables = random_tables(destination, transfer.num_tokens, rng)
    sources, pools = empty_pools(wire, source_tables), empty_pools(destination, tables)
    for rank, pool in enumerate(sources):
        scatter(pool, wire, rank, kv, source_tables, range(transfer.num_tokens))
    num_writes = [np.zeros(pool.shape, int) for pool in pools]
    for pair, piece in transfer.pieces():
        group = piece.cells.group
        source = sources[pair.source_rank][source_tables[group][piece.source_position]]
        block = tables[group][piece.cells.position]
        taken = [source[start : start + size] for start, size in piece.source_runs]
        data = np.concatenate(taken)
        assert len(data) == piece.num_bytes(destination.groups[group].slot) > 0
        for start, size in piece.destination_runs:
            pools[pair.destination_rank][block, start : start + size] = data[:size]
            num_writes[pair.destination_rank][block, start : start + size] += 1
            data = data[size:]
        assert not len(data)

    needed = range(transfer.first_token, transfer.num_tokens)
    end_token = destination.num_blocks(transfer.num_tokens) * destination.block_size
    is_same_size = wire.block_size == destination.block_size
    free = range(transfer.num_tokens, end_token if is_same_size else transfer.num_tokens)
    marks = [[np.full((end_token, *part.shape[1:]), 1, np.uint8) for part in parts] for parts in kv]
    expected, is_needed, is_free = (empty_pools(destination, tables) for _ in range(3))
    for rank, pool in enumerate(pools):
        scatter(expected[rank], destination, rank, kv, tables, needed)
        scatter(is_needed[rank], destination, rank, marks, tables, needed)
        scatter(is_free[rank], destination, rank, marks, tables, free)
        must, may = is_needed[rank] == 1, is_free[rank] == 1
        assert (num_writes[rank][must] == 1).all()
        assert (num_writes[rank][may] <= 1).all()
        assert (num_writes[rank][~must & ~may] == 0).all()
        assert (pool[~may] == expected[rank][~may]).all()


@given(transfers(), st.data())
def test_all_source_ranks_together_cover_it_and_no_fewer(
    transfer: Transfer, data: st.DataObject
) -> None:
    pieces = data.draw(st.permutations(transfer.pieces()))
    coverages = transfer.coverages()
    for pair, piece in pieces:
        coverage = coverages[pair.destination_rank]
        assert not coverage.is_complete
        assert coverage.lacking_layers(*piece.cells) == [piece.cells[2:4]]
        assert coverage.admit(*piece.cells)
        assert not coverage.admit(*piece.cells)
    assert all(coverage.is_complete for coverage in coverages)

    ranks = sorted({pair.source_rank for pair, _ in pieces})
    silent = data.draw(st.sets(st.sampled_from(ranks), min_size=1))
    coverages = transfer.coverages()
    for pair, piece in pieces:
        if pair.source_rank not in silent:
            coverages[pair.destination_rank].admit(*piece.cells)
    assert not all(coverage.is_complete for coverage in coverages)


@given(transfers())
def test_no_two_runs_of_a_block_could_be_one(transfer: Transfer) -> None:
    for _, piece in transfer.pieces():
        for runs in (piece.source_runs, piece.destination_runs):
            for (start, size), after in pairwise(runs):
                assert start + size <= after.offset_bytes
        if piece.num_slots == transfer.plan.destination.block_size:
            runs = piece.destination_runs
            assert all(sum(run) < after.offset_bytes for run, after in pairwise(runs))


@given(transfers())
def test_the_bytes_on_the_wire_are_known_beforehand(transfer: Transfer) -> None:
    plan = transfer.plan
    for extent in transfer.extents:
        wire = plan.formats[extent.group].wire
        for pair in plan.pairs:
            pieces = plan.pieces(pair, extent, transfer.num_tokens)
            num_bytes = sum(piece.num_bytes(wire) for piece in pieces)
            assert plan.num_bytes(pair, extent, transfer.num_tokens) == num_bytes


@given(transfers())
def test_cells_name_their_piece(transfer: Transfer) -> None:
    for pair, piece in transfer.pieces():
        assert transfer.plan.piece_of(pair, piece.cells, transfer.num_tokens) == piece


@given(transfers(), st.data())
def test_cells_that_no_piece_has_are_refused(transfer: Transfer, data: st.DataObject) -> None:
    """Whatever a peer says, a piece that is found lies inside its blocks."""
    pair, piece = data.draw(st.sampled_from(transfer.pieces()))
    field = data.draw(st.sampled_from(piece.cells._fields))
    cells = piece.cells._replace(**{field: data.draw(st.integers(-2, 70))})
    try:
        found = transfer.plan.piece_of(pair, cells, transfer.num_tokens)
    except LayoutMismatch:
        return
    assert found.cells == cells
    assert min(found.source_position, cells.position) >= 0
    for layout, rank, runs in (
        (transfer.plan.source, pair.source_rank, found.source_runs),
        (transfer.plan.destination, pair.destination_rank, found.destination_runs),
    ):
        for run in runs:
            assert 0 <= run.offset_bytes <= layout.rank_block_bytes(rank) - run.num_bytes


@pytest.mark.parametrize(
    "lie",
    [
        {"group": -1},
        {"group": 1},
        {"position": -1},
        {"position": 3},
        {"first_layer": 3},
        {"num_layers": 0},
        {"num_layers": 2**40},
        {"first_slot": -1},
        {"end_slot": 0},
        {"end_slot": 2**60},
        {"share": 1},
    ],
)
def test_a_lie_of_a_peer_is_refused_at_once(lie: dict[str, int]) -> None:
    plan = build_plan(make_layout(6), make_layout(4))
    pair = plan.pair(0, 0)
    piece = plan.pieces(pair, Extent(0, 0, 3, 0, 9), num_tokens=9)[0]
    assert plan.piece_of(pair, piece.cells, 9) == piece
    with pytest.raises(LayoutMismatch, match="no piece from rank 0 to rank 0 fills"):
        plan.piece_of(pair, piece.cells._replace(**lie), 9)


def test_ranks_that_share_nothing_are_no_pair() -> None:
    plan = build_plan(make_layout(tensor_ranks=2), make_layout(tensor_ranks=2))
    assert plan.pair(1, 1).destination_rank == 1
    with pytest.raises(LayoutMismatch, match="rank 0 has nothing for rank 1"):
        plan.pair(0, 1)


@given(layout_pairs(), st.integers(1, 70), st.data())
def test_equal_layouts_need_one_run_a_block_and_layer_range(
    layouts: tuple[KVLayout, KVLayout], num_tokens: int, data: st.DataObject
) -> None:
    layout = replace(layouts[0], wire_dtype=None)
    plan = build_plan(layout, layout)
    assert plan.is_identity == (layout.num_ranks == 1)
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    layers = data.draw(cuts(0, len(layout.groups[group].layers)))[0]
    extent = Extent(group, layers.start, len(layers), 0, num_tokens)
    for pair in plan.pairs:
        assert pair.source_rank == pair.destination_rank
        shape = layout.rank_groups(pair.source_rank)[group]
        for position, piece in enumerate(plan.pieces(pair, extent, num_tokens)):
            assert shape is not None
            assert piece.source_position == piece.cells.position == position
            assert piece.cells.end_slot == layout.valid_slots(position, num_tokens)
            layer_bytes = shape.layer_bytes(layout.block_size)
            offset = piece.cells.first_layer * layer_bytes
            num_bytes = piece.cells.num_layers * layer_bytes
            assert piece.source_runs == piece.destination_runs == (Run(offset, num_bytes),)
    covered = {pair.destination_rank for pair in plan.pairs if pair.routes[group]}
    assert covered == {r for r in range(layout.num_ranks) if layout.rank_groups(r)[group]}


# ---------------------------------------------------------------- single plans


def make_layout(
    block_size: int = 4,
    num_heads: int = 2,
    dtype: str = "float32",
    num_layers: int = 3,
    **options: Any,
) -> KVLayout:
    slot = SlotFormat.of(dtype, 2)
    group = KVGroup(GroupKind.FULL_ATTENTION, tuple(range(num_layers)), num_heads, slot)
    return KVLayout(block_size, (group,), **options)


def pairs_of(plan: TransferPlan) -> list[tuple[int, int]]:
    return [(pair.source_rank, pair.destination_rank) for pair in plan.pairs]


def test_a_head_split_is_one_run_a_layer() -> None:
    """Tensor ranks differ, block sizes do not: slabs stay whole."""
    plan = build_plan(make_layout(), make_layout(tensor_ranks=2))
    assert not plan.is_identity
    assert pairs_of(plan) == [(0, 0), (0, 1)]
    (piece,) = plan.pieces(plan.pairs[1], Extent(0, 0, 3, 0, 3), num_tokens=3)
    slab = make_layout().groups[0].slab_bytes(4)
    assert list(piece.source_runs) == [Run((2 * i + 1) * slab, slab) for i in range(3)]
    assert piece.destination_runs == (Run(0, 3 * slab),)


def test_a_pipeline_split_is_one_run_a_block() -> None:
    plan = build_plan(make_layout(), make_layout(pipeline_ranks=2))
    layer = make_layout().groups[0].layer_bytes(4)
    (piece,) = plan.pieces(plan.pairs[1], Extent(0, 0, 3, 0, 4), num_tokens=4)
    assert (piece.source_runs, piece.destination_runs) == (
        (Run(2 * layer, layer),),
        (Run(0, layer),),
    )
    assert piece.cells[2:4] == (0, 1)


def test_other_block_sizes_move_k_and_v_of_each_head_apart() -> None:
    plan = build_plan(make_layout(6, num_layers=1), make_layout(4, num_layers=1))
    pieces = plan.pieces(plan.pairs[0], Extent(0, 0, 1, 4, 9), num_tokens=9)
    assert [(p.source_position, p.cells.position) for p in pieces] == [(0, 1), (1, 1), (1, 2)]
    assert [(p.cells.first_slot, p.cells.end_slot) for p in pieces] == [(0, 2), (2, 4), (0, 1)]
    row = 8  # two float32
    parts = [(head, part) for head in range(2) for part in range(2)]
    assert list(pieces[0].source_runs) == [
        Run((12 * head + 6 * part + 4) * row, 2 * row) for head, part in parts
    ]
    assert list(pieces[0].destination_runs) == [
        Run((8 * head + 4 * part) * row, 2 * row) for head, part in parts
    ]


@pytest.mark.parametrize(
    ("source_ranks", "ranks", "pairs"),
    [
        (4, 4, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (4, 2, [(0, 0), (2, 1)]),
        (2, 4, [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (4, 1, [(0, 0)]),
        (3, 2, [(0, 0), (1, 1)]),
    ],
)
def test_copies_of_a_head_are_read_from_different_ranks(
    source_ranks: int, ranks: int, pairs: list[tuple[int, int]]
) -> None:
    source = make_layout(num_heads=1, tensor_ranks=source_ranks)
    destination = make_layout(num_heads=1, tensor_ranks=ranks)
    assert pairs_of(build_plan(source, destination)) == pairs


def test_nothing_to_carry_is_no_piece() -> None:
    plan = build_plan(make_layout(), make_layout())
    assert plan.pieces(plan.pairs[0], Extent(0, 0, 3, 5, 5), num_tokens=5) == []
    other = build_plan(make_layout(), make_layout(pipeline_ranks=2))
    assert other.pieces(other.pairs[1], Extent(0, 0, 2, 0, 4), num_tokens=4) == []


# ---------------------------------------------------------------- whether a plan exists


def changed(layout: KVLayout, change: str, value: int) -> KVLayout:
    """The layout with one thing changed; value 1, 2 or 3."""
    first = layout.groups[0]
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "block size": {"block_size": value},
        "tensor ranks": {"tensor_ranks": value},
        "pipeline ranks": {"pipeline_ranks": value},
        "dtype": {"slot": SlotFormat.of(sorted(KV_DTYPES)[value], first.slot.head_dim)},
        "head_dim": {"slot": SlotFormat.of(first.slot.dtype, value)},
        "heads": {"num_kv_heads": value},
        "layers": {"layers": tuple(range(value))},
    }
    if change == "groups":
        return replace(layout, groups=layout.groups * value)
    if change in ("dtype", "head_dim", "heads", "layers"):
        return replace(layout, groups=(replace(first, **changes[change]), *layout.groups[1:]))
    return replace(layout, **changes[change])


CHANGES = ["nothing", "block size", "tensor ranks", "pipeline ranks", "dtype", "head_dim", "heads",
           "layers", "groups"]  # fmt: skip


@given(
    layout_pairs(),
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(1, 3)), max_size=2),
)
def test_a_plan_exists_exactly_when_the_layouts_convert(
    layouts: tuple[KVLayout, KVLayout], changes: list[tuple[str, int]]
) -> None:
    source, destination = layouts
    for change in changes:
        destination = changed(destination, *change)
    if can_convert(source, destination):
        assert build_plan(source, destination).destination == destination
    else:
        with pytest.raises(LayoutMismatch):
            build_plan(source, destination)


def test_a_mismatch_names_both_values() -> None:
    with pytest.raises(LayoutMismatch, match=r"KV dtype.*source float32, destination bfloat16"):
        build_plan(make_layout(), make_layout(dtype="bfloat16"))


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 8},
        {"tensor_ranks": 2},
        {"pipeline_ranks": 3},
        {"wire_dtype": "int8_per_token_head"},
    ],
)
def test_any_difference_makes_a_plan_more_than_the_identity(change: dict[str, Any]) -> None:
    layout = make_layout()
    assert build_plan(layout, layout).is_identity
    assert build_plan(replace(layout, wire_dtype="bfloat16"), layout).is_identity
    assert build_plan(layout, replace(layout, wire_dtype="float32")).is_identity
    assert not build_plan(layout, replace(layout, **change)).is_identity


def test_a_plan_names_the_formats_of_each_group() -> None:
    source = make_layout(dtype="bfloat16")
    destination = make_layout(8, dtype="float32", wire_dtype="int8_per_token_head")
    formats = [SlotFormat.of(d, 2) for d in ("bfloat16", "int8_per_token_head", "float32")]
    assert build_plan(source, destination).formats == (SlotFormats(*formats),)
