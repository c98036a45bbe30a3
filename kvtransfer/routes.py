"""Which ranks give which ranks what, and where it lies in a block of either side.

Where the same head lies on several source ranks, one of them gives it to a destination rank; destination ranks that
hold the same head take it from different ones as far as there are. So every needed byte comes exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from core.kv_layout import KVLayout, RankShare, Run, SlotFormat


class SlotMove(NamedTuple):
    """Slots that follow each other in one block of either side: where they begin in each, and how many."""

    source_slot: int
    slot: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Side:
    """What a rank of one side holds of one group, and how.

    share: the layers and heads that it holds.
    block_size: slots of its blocks.
    slot: how it keeps a token's head.
    """

    share: RankShare
    block_size: int
    slot: SlotFormat

    def runs(self, layers: range, heads: range, slots: range) -> tuple[Run, ...]:
        """The fewest runs of a block that hold these slots of these heads and layers, ascending.

        layers: places inside the group, as in the whole model; heads: the model's. One behind the other the runs are
        what goes over the wire: layer, head, slab of just these slots.
        """
        if len(slots) == self.block_size:
            return tuple(self._slab_runs(layers, heads))
        return tuple(self._slot_runs(layers, heads, slots))

    def _slab_runs(self, layers: range, heads: range) -> list[Run]:
        """Whole slabs: one run a layer, or one in all where the rank holds these heads and no others."""
        slab_bytes = self.slot.slot_bytes * self.block_size
        if heads == self.share.heads:
            starts, num_slabs = layers[:1], len(layers) * len(heads)
        else:
            starts, num_slabs = layers, len(heads)
        return [
            Run(self.share.slab_index(layer, heads.start) * slab_bytes, num_slabs * slab_bytes)
            for layer in starts
        ]

    def _slot_runs(self, layers: range, heads: range, slots: range) -> list[Run]:
        """Some slots: one run for each part of each slab, since the parts are apart."""
        slab_bytes = self.slot.slot_bytes * self.block_size
        places = [
            Run(part.offset_bytes + slots.start * part.slot_bytes, len(slots) * part.slot_bytes)
            for part in self.slot.slab_parts(self.block_size)
        ]
        return [
            Run(self.share.slab_index(layer, head) * slab_bytes + offset_bytes, num_bytes)
            for layer in layers
            for head in heads
            for offset_bytes, num_bytes in places
        ]


@dataclass(frozen=True, slots=True)
class Route:
    """What one source rank gives one destination rank of one group.

    layers: places inside the group that both hold, half-open.
    heads: the model's KV heads that go this way, half-open.
    part: which of the destination rank's parts these heads are, see `Cells.share`.
    source, destination: all that either rank holds of the group.
    """

    layers: range
    heads: range
    part: int
    source: Side
    destination: Side


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
    ours, theirs = destination.groups[group].slot, source.groups[group].slot
    held = Side(destination.rank_share(group, rank), destination.block_size, ours)
    for part, (tensor_rank, heads) in enumerate(givers(source, destination, group, rank).items()):
        for source_rank in range(tensor_rank, source.num_ranks, source.tensor_ranks):
            given = Side(source.rank_share(group, source_rank), source.block_size, theirs)
            if layers := common(given.share.layers, held.share.layers):
                yield source_rank, Route(layers, heads, part, given, held)


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
