"""Where bytes of a source pool go in a destination pool.

A plan exists exactly when `core.kv_layout.can_convert` says so. Today that means equal layouts, so
every run keeps its place inside the block and only the block changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from core.errors import LayoutMismatch
from core.ids import BlockId
from core.kv_layout import KVLayout, conversion_obstacles


class PlannedRun(NamedTuple):
    """Consecutive bytes of the source pool, and where they lie in the destination pool."""

    source_offset_bytes: int
    destination_offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How to carry blocks of one layout into blocks of another. Made by `build_plan`."""

    source: KVLayout
    destination: KVLayout

    def runs(
        self,
        group: int,
        blocks: Iterable[tuple[BlockId, BlockId]],
        first_layer: int,
        num_layers: int,
    ) -> list[PlannedRun]:
        """Runs that carry layers `[first_layer, first_layer + num_layers)` of (source, destination)
        blocks, one a block.
        """
        offset_bytes, num_bytes = self.source.layer_run(group, first_layer, num_layers)
        source_bytes, destination_bytes = self.source.block_bytes, self.destination.block_bytes
        return [
            PlannedRun(
                source * source_bytes + offset_bytes,
                destination * destination_bytes + offset_bytes,
                num_bytes,
            )
            for source, destination in blocks
        ]


def build_plan(source: KVLayout, destination: KVLayout) -> TransferPlan:
    """The plan from source to destination, or LayoutMismatch that names both sides' values."""
    obstacles = conversion_obstacles(source, destination)
    if obstacles:
        raise LayoutMismatch(f"no transfer plan: {'; '.join(obstacles)}")
    return TransferPlan(source, destination)
