"""Which ranks give which ranks what, and the runs between a block of one and a block of the other.

Where the same head lies on several source ranks, one of them gives it to a destination rank; destination ranks that
hold the same head take it from different ones as far as there are. So every needed byte comes exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from core.kv_layout import KVLayout, RankShare, SlotFormat


class PlannedRun(NamedTuple):
    """Consecutive bytes, by their offset inside the source's block and inside the destination's."""

    source_offset_bytes: int
    destination_offset_bytes: int
    num_bytes: int


class SlotMove(NamedTuple):
    """Slots that follow each other in one block of either side: where they begin in each, and how many."""

    source_slot: int
    slot: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Route:
    """What one source rank gives one destination rank of one group.

    layers: places inside the group that both hold, half-open.
    heads: the model's KV heads that go this way, half-open.
    share: which of the destination rank's parts these heads are, see `Cells`.
    source, destination: all that either rank holds of the group.
    source_block_size, destination_block_size: slots of a block.
    slot: the format on the wire and at the destination.
    """

    layers: range
    heads: range
    share: int
    source: RankShare
    destination: RankShare
    source_block_size: int
    destination_block_size: int
    slot: SlotFormat

    def runs(self, layers: range, slots: SlotMove) -> tuple[PlannedRun, ...]:
        """The fewest runs that carry these slots of these layers."""
        sizes = {slots.num_slots, self.source_block_size, self.destination_block_size}
        if len(sizes) == 1:
            return tuple(self._slab_runs(layers))
        return tuple(self._slot_runs(layers, slots))

    def _slab_runs(self, layers: range) -> list[PlannedRun]:
        """Whole slabs: one run a layer, or one in all where both ranks hold these heads and no others."""
        slab_bytes = self.slot.slot_bytes * self.source_block_size
        if self.heads == self.source.heads == self.destination.heads:
            starts, num_slabs = layers[:1], len(layers) * len(self.heads)
        else:
            starts, num_slabs = layers, len(self.heads)
        return [
            PlannedRun(
                self.source.slab_index(layer, self.heads.start) * slab_bytes,
                self.destination.slab_index(layer, self.heads.start) * slab_bytes,
                num_slabs * slab_bytes,
            )
            for layer in starts
        ]

    def _slot_runs(self, layers: range, slots: SlotMove) -> list[PlannedRun]:
        """Some slots: one run for each part of each slab, since the parts are apart on one side at least."""
        source_parts = self.slot.slab_parts(self.source_block_size)
        parts = self.slot.slab_parts(self.destination_block_size)
        source_bytes = self.slot.slot_bytes * self.source_block_size
        slab_bytes = self.slot.slot_bytes * self.destination_block_size
        places = [
            (
                source_part.offset_bytes + slots.source_slot * part.slot_bytes,
                part.offset_bytes + slots.slot * part.slot_bytes,
                slots.num_slots * part.slot_bytes,
            )
            for source_part, part in zip(source_parts, parts, strict=True)
        ]
        slabs = [
            (
                self.source.slab_index(layer, head) * source_bytes,
                self.destination.slab_index(layer, head) * slab_bytes,
            )
            for layer in layers
            for head in self.heads
        ]
        return [
            PlannedRun(source_slab + source_offset, slab + offset, num_bytes)
            for source_slab, slab in slabs
            for source_offset, offset, num_bytes in places
        ]


class RankPair(NamedTuple):
    """A source rank and a destination rank that share something.

    routes: for each KV group what goes this way, None for nothing.
    """

    source_rank: int
    destination_rank: int
    routes: tuple[Route | None, ...]


def rank_pairs(source: KVLayout, destination: KVLayout) -> tuple[RankPair, ...]:
    """All rank pairs with a route in some group."""
    num_groups = len(source.groups)
    found: dict[tuple[int, int], list[Route | None]] = {}
    for rank in range(destination.num_ranks):
        for group in range(num_groups):
            for source_rank, route in _routes(source, destination, group, rank):
                routes = found.setdefault((rank, source_rank), [None] * num_groups)
                routes[group] = route
    return tuple(
        RankPair(source_rank, rank, tuple(routes))
        for (rank, source_rank), routes in sorted(found.items(), key=lambda item: item[0])
    )


def _routes(
    source: KVLayout, destination: KVLayout, group: int, rank: int
) -> Iterator[tuple[int, Route]]:
    """The source ranks that give a destination rank something of a group, and what."""
    held = destination.rank_share(group, rank)
    for share, (tensor_rank, heads) in enumerate(givers(source, destination, group, rank).items()):
        for source_rank in range(tensor_rank, source.num_ranks, source.tensor_ranks):
            theirs = source.rank_share(group, source_rank)
            if layers := common(theirs.layers, held.layers):
                yield (
                    source_rank,
                    Route(
                        layers=layers,
                        heads=heads,
                        share=share,
                        source=theirs,
                        destination=held,
                        source_block_size=source.block_size,
                        destination_block_size=destination.block_size,
                        slot=destination.groups[group].slot,
                    ),
                )


def givers(source: KVLayout, destination: KVLayout, group: int, rank: int) -> dict[int, range]:
    """The source's tensor ranks that give a destination rank its heads of a group, and which, ascending by head.

    Copy c of a head at the destination takes it from copy c of it at the source, scaled where they are not as many.
    """
    num_heads = source.groups[group].num_kv_heads
    copies, source_copies = destination.head_copies(group), source.head_copies(group)
    source_copy = rank % destination.tensor_ranks % copies * source_copies // copies
    givers: dict[int, range] = {}
    for head in destination.rank_share(group, rank).heads:
        giver = head * source.tensor_ranks // num_heads + source_copy
        givers[giver] = range(givers[giver].start if giver in givers else head, head + 1)
    return givers


def common(one: range, other: range) -> range:
    """What two half-open stretches share; empty when they do not meet."""
    return range(max(one.start, other.start), min(one.stop, other.stop))
