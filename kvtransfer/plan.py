"""Which bytes of which source blocks go where in which destination blocks.

Two layouts may differ in block size, ranks and KV dtype (`core.kv_layout.conversion_obstacles` says how far). A plan is
data and arithmetic over both layouts: it knows positions in a sequence, never block ids, sessions or memory.

    plan   = the rank pairs that share anything, each with its route in every group
    route  = the layers and heads that one source rank gives one destination rank
    piece  = what a route carries between one source block and one destination block: whole cells of the
             destination's block, and the runs of either block that hold them
    run    = consecutive bytes of a block

What a transport does with a plan:
- P, for each pair of its rank: take the bytes of a piece's source runs one behind the other, convert them where the
  wire has another format (`kvtransfer.codec`), and send them as one message that names the piece's cells.
- D trusts no offset from outside: it knows both layouts from the handshake, has the same plan, and finds the runs of
  the named cells by `plan.piece_of`. It verifies the message whole, converts it where its own format is another, puts
  it into the destination runs under the permit of the block at the cells' position, and only then admits the cells:
  `coverage.admit(*piece.cells)`.
- D's coverage for a rank is `Coverage(needed, plan.num_layers(rank), plan.num_shares(rank))`. The session is complete
  when the coverage of each rank is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from core.errors import LayoutMismatch
from core.kv_layout import KVLayout, Run, SlotFormat, conversion_obstacles
from kvtransfer.routes import RankPair, Route, SlotMove, common, givers, rank_pairs


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
    num_slabs, num_slots: slabs (a head of a layer) that it is of, and slots of each.
    source_runs, destination_runs: where it lies in either block, ascending.
    """

    source_position: int
    cells: Cells
    num_slabs: int
    num_slots: int
    source_runs: tuple[Run, ...]
    destination_runs: tuple[Run, ...]

    def num_bytes(self, slot: SlotFormat) -> int:
        """Bytes of the piece in a slot format."""
        return self.num_slabs * self.num_slots * slot.slot_bytes


class SlotFormats(NamedTuple):
    """How a group's slots are kept by the sender, sent, and kept by the receiver."""

    source: SlotFormat
    wire: SlotFormat
    destination: SlotFormat


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How to carry KV of one layout into another. Made by `build_plan`.

    pairs: the rank pairs that share anything, ascending by destination rank, then source rank.
    formats: for each KV group its formats on the way.
    """

    source: KVLayout
    destination: KVLayout
    pairs: tuple[RankPair, ...]
    formats: tuple[SlotFormats, ...]

    @property
    def is_identity(self) -> bool:
        """Whether a run keeps its bytes and its place inside the block, from the only rank to the only rank."""
        ours, theirs = self.source, self.destination
        return (
            (ours.block_size, ours.groups) == (theirs.block_size, theirs.groups)
            and ours.num_ranks == theirs.num_ranks == 1
            and all(len(set(formats)) == 1 for formats in self.formats)
        )

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
        places: dict[SlotMove, tuple[tuple[Run, ...], tuple[Run, ...]]] = {}
        pieces = []
        for source_position, position, move in self._moves(extent, num_tokens):
            if move not in places:
                places[move] = _places(route, layers, move)
            end_slot = move.slot + move.num_slots
            cells = Cells(
                group=extent.group,
                position=position,
                first_layer=layers.start - route.destination.share.layers.start,
                num_layers=len(layers),
                end_slot=min(end_slot, self.destination.valid_slots(position, num_tokens)),
                first_slot=move.slot,
                share=route.part,
            )
            num_slabs = len(layers) * len(route.heads)
            pieces.append(Piece(source_position, cells, num_slabs, move.num_slots, *places[move]))
        return pieces

    def num_bytes(self, pair: RankPair, extent: Extent, num_tokens: int) -> int:
        """Bytes on the wire of all `pieces`."""
        route = pair.routes[extent.group]
        if route is None:
            return 0
        asked = range(extent.first_layer, extent.first_layer + extent.num_layers)
        num_slots = max(0, self._end_token(extent, num_tokens) - extent.first_token)
        num_slabs = len(common(route.layers, asked)) * len(route.heads)
        return num_slabs * num_slots * self.formats[extent.group].wire.slot_bytes

    def piece_of(self, pair: RankPair, cells: Cells, num_tokens: int) -> Piece:
        """The piece that fills exactly these cells; LayoutMismatch when the pair has none. No field is trusted."""
        pieces = []
        size = self.destination.block_size
        is_in_block = cells.position >= 0 and 0 <= cells.first_slot < cells.end_slot <= size
        if is_in_block and 0 <= cells.group < len(pair.routes):
            route = pair.routes[cells.group]
            first_place = route.destination.share.layers.start if route else 0
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
        token, end_token = extent.first_token, self._end_token(extent, num_tokens)
        while token < end_token:
            source_position, source_slot = divmod(token, source_size)
            position, slot = divmod(token, size)
            num_slots = min(source_size - source_slot, size - slot, end_token - token)
            yield source_position, position, SlotMove(source_slot, slot, num_slots)
            token += num_slots

    def _end_token(self, extent: Extent, num_tokens: int) -> int:
        """Where what is carried of an extent ends: with equal block sizes the last block goes as a whole."""
        size = self.source.block_size
        is_last = extent.first_token < extent.end_token == num_tokens
        if is_last and size == self.destination.block_size:
            return self.source.num_blocks(num_tokens) * size
        return extent.end_token


def build_plan(source: KVLayout, destination: KVLayout) -> TransferPlan:
    """The plan from source to destination, or LayoutMismatch that names both sides' values."""
    obstacles = conversion_obstacles(source, destination)
    if obstacles:
        raise LayoutMismatch(f"no transfer plan: {'; '.join(obstacles)}")
    formats = tuple(
        SlotFormats(ours.slot, destination.wire_slot(index), theirs.slot)
        for index, (ours, theirs) in enumerate(zip(source.groups, destination.groups, strict=True))
    )
    return TransferPlan(source, destination, rank_pairs(source, destination), formats)


def _places(route: Route, layers: range, move: SlotMove) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Where slots of some layers lie in a block of the source, and where in one of the destination."""
    return (
        route.source.runs(
            layers, route.heads, range(move.source_slot, move.source_slot + move.num_slots)
        ),
        route.destination.runs(layers, route.heads, range(move.slot, move.slot + move.num_slots)),
    )
