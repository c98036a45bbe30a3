"""Which bytes of which source blocks go where in which destination blocks.

Two layouts may differ in block size, ranks and KV dtype (`core.kv_layout.conversion_obstacles` says how far). A plan is
data and arithmetic over both layouts: it knows positions in a sequence, never block ids, sessions or memory.

    plan   = the rank pairs that share anything, each with its route in every group
    route  = the layers and heads that one source rank gives one destination rank
    piece  = what a route carries between one source block and one destination block: whole cells of the
             destination's block, and the runs that fill them
    run    = consecutive bytes of both blocks

What a transport does with a plan:
- P, for each pair of its rank: convert first where `plan.conversions` names a conversion for the group, by
  `kernels.ops.convert_kv` into staging blocks of `plan.wire` (the source's blocks, in the destination's KV dtype), so
  that what is on the wire is what D keeps. Then send the runs of each of `plan.pieces`, in their order, as one
  message that names the piece's cells.
- D trusts no offset from outside: it knows both layouts from the handshake, has the same plan, and finds the runs of
  the named cells by `plan.piece_of`. It writes them under the permit of the block at the cells' position, verifies
  the message whole, and only then admits the cells: `coverage.admit(*piece.cells)`.
- D's coverage for a rank is `Coverage(needed, plan.num_layers(rank), plan.num_shares(rank))`. The session is complete
  when the coverage of each rank is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from core.errors import LayoutMismatch
from core.kv_layout import SERVED, Conversion, KVLayout, conversion_obstacles
from kvtransfer.routes import PlannedRun, RankPair, SlotMove, common, givers, rank_pairs


class Extent(NamedTuple):
    """What of a sequence is to be carried: tokens `[first_token, end_token)` in layers of one group.

    first_layer, num_layers: places inside the group, as in the whole model.
    """

    group: int
    first_layer: int
    num_layers: int
    first_token: int
    end_token: int


class Cells(NamedTuple):
    """A range of `kvtransfer.coverage` on the destination rank, in the order that its methods take.

    position: the destination's block in the sequence.
    first_layer, num_layers: places among the layers that the destination rank holds of the group.
    first_slot, end_slot: slots of the block, half-open.
    share: which of the parts that the rank's heads come in; one for each sending tensor rank, by heads.
    """

    group: int
    position: int
    first_layer: int
    num_layers: int
    end_slot: int
    first_slot: int
    share: int


class Piece(NamedTuple):
    """Cells of one destination block that come from one source block, K, V and scales alike.

    source_position: the source's block in the sequence.
    runs: all that fills the cells, ascending on both sides.
    """

    source_position: int
    cells: Cells
    runs: tuple[PlannedRun, ...]


class SlotConversion(NamedTuple):
    """The KV dtypes between which the sender converts before anything of a group is sent."""

    source_dtype: str
    destination_dtype: str


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How to carry KV of one layout into another. Made by `build_plan`.

    pairs: the rank pairs that share anything, ascending by destination rank, then source rank.
    conversions: for each KV group the conversion that all its runs pass on the sender's side, None for none.
    """

    source: KVLayout
    destination: KVLayout
    pairs: tuple[RankPair, ...]
    conversions: tuple[SlotConversion | None, ...]

    @property
    def is_identity(self) -> bool:
        """Whether both layouts are equal, so that a run keeps its place inside the block."""
        return self.source == self.destination

    @property
    def wire(self) -> KVLayout:
        """The layout of the blocks that are sent: the source's, in the destination's KV dtypes."""
        return _wire(self.source, self.destination)

    def pair(self, source_rank: int, destination_rank: int) -> RankPair:
        """The pair of these ranks; LayoutMismatch when they share nothing."""
        for pair in self.pairs:
            if pair[:2] == (source_rank, destination_rank):
                return pair
        raise LayoutMismatch(f"rank {source_rank} has nothing for rank {destination_rank}")

    def num_layers(self, rank: int) -> list[int]:
        """For each KV group, the layers that a destination rank holds."""
        groups = range(len(self.destination.groups))
        return [len(self.destination.rank_share(group, rank).layers) for group in groups]

    def num_shares(self, rank: int) -> list[int]:
        """For each KV group, in how many parts the heads of a destination rank come."""
        return [
            len(givers(self.source, self.destination, group, rank))
            for group in range(len(self.destination.groups))
        ]

    def pieces(self, pair: RankPair, extent: Extent, num_tokens: int) -> list[Piece]:
        """What a pair carries of an extent, ascending by token.

        num_tokens: tokens of the whole transfer. Slots past them belong to nobody yet, so that with equal block
            sizes the last block goes in whole slabs too; their bytes are written and mean nothing.
        """
        route = pair.routes[extent.group]
        if route is None:
            return []
        asked = range(extent.first_layer, extent.first_layer + extent.num_layers)
        layers = common(route.layers, asked)
        if not layers:
            return []
        # most blocks of a sequence lie to each other as others do
        runs: dict[SlotMove, tuple[PlannedRun, ...]] = {}
        pieces = []
        for source_position, position, slots in self._moves(extent, num_tokens):
            if slots not in runs:
                runs[slots] = route.runs(layers, slots)
            cells = Cells(
                group=extent.group,
                position=position,
                first_layer=layers.start - route.destination.layers.start,
                num_layers=len(layers),
                end_slot=min(
                    slots.slot + slots.num_slots,
                    self.destination.valid_slots(position, num_tokens),
                ),
                first_slot=slots.slot,
                share=route.share,
            )
            pieces.append(Piece(source_position, cells, runs[slots]))
        return pieces

    def piece_of(self, pair: RankPair, cells: Cells, num_tokens: int) -> Piece:
        """The piece that fills exactly these cells; LayoutMismatch when the pair has none. No field is trusted."""
        pieces = []
        size = self.destination.block_size
        is_in_block = cells.position >= 0 and 0 <= cells.first_slot < cells.end_slot <= size
        if is_in_block and 0 <= cells.group < len(pair.routes):
            route = pair.routes[cells.group]
            first_place = route.destination.layers.start if route else 0
            start = cells.position * size
            extent = Extent(
                group=cells.group,
                first_layer=first_place + cells.first_layer,
                num_layers=cells.num_layers,
                first_token=start + cells.first_slot,
                end_token=start + cells.end_slot,
            )
            pieces = self.pieces(pair, extent, num_tokens)
        if len(pieces) != 1 or pieces[0].cells != cells:
            pair_name = f"rank {pair.source_rank} to rank {pair.destination_rank}"
            raise LayoutMismatch(f"no piece from {pair_name} fills {cells}")
        return pieces[0]

    def _moves(self, extent: Extent, num_tokens: int) -> Iterator[tuple[int, int, SlotMove]]:
        """The tokens of an extent, cut where a block of either side ends: both positions, and the slots."""
        source_size, size = self.source.block_size, self.destination.block_size
        token, end_token = extent.first_token, extent.end_token
        if source_size == size and token < end_token == num_tokens:
            end_token = self.source.num_blocks(num_tokens) * size
        while token < end_token:
            source_position, source_slot = divmod(token, source_size)
            position, slot = divmod(token, size)
            num_slots = min(source_size - source_slot, size - slot, end_token - token)
            yield source_position, position, SlotMove(source_slot, slot, num_slots)
            token += num_slots


def build_plan(
    source: KVLayout, destination: KVLayout, allowed: Conversion = SERVED
) -> TransferPlan:
    """The plan from source to destination, or LayoutMismatch that names both sides' values.

    allowed: how far it may change KV; LOSSY is for the receiver to choose.
    """
    obstacles = conversion_obstacles(source, destination, allowed)
    if obstacles:
        raise LayoutMismatch(f"no transfer plan: {'; '.join(obstacles)}")
    dtypes = [
        SlotConversion(ours.slot.dtype, theirs.slot.dtype)
        for ours, theirs in zip(source.groups, destination.groups, strict=True)
    ]
    conversions = tuple(
        None if ours == theirs else SlotConversion(ours, theirs) for ours, theirs in dtypes
    )
    return TransferPlan(source, destination, rank_pairs(source, destination), conversions)


def _wire(source: KVLayout, destination: KVLayout) -> KVLayout:
    groups = zip(source.groups, destination.groups, strict=True)
    return replace(source, groups=tuple(replace(ours, slot=theirs.slot) for ours, theirs in groups))
