"""A run as it is announced and answered, whatever the transport."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from core.errors import LayoutMismatch
from core.ids import SessionId
from core.kv_layout import KVLayout, Run
from kvtransfer.session import SessionKey

UNCHECKED = -1
"""For a checksum: the bytes are not checked, since no wire carries them."""


_MAX_WIDENING = 8
"""How much larger than a block its KV may be on the wire: float32 for fp8, with room."""


class RunHeader(NamedTuple):
    """What a sender says of a run before its bytes. Nothing in it is trusted before `RunPlaces`.

    rank: the sender's rank.
    position, first_layer, num_layers: of the receiver's block, and among the layers that its rank holds.
    valid_slots: where the block's slots end that hold the sequence's KV in these layers, or that the run fills.
    num_bytes, checksum: length of the payload and its CRC-32C, or UNCHECKED.
    number: the sender's name for the run, repeated in the answer.
    first_slot: where the slots begin that the run fills.
    """

    session: SessionId
    attempt: int
    rank: int
    group: int
    position: int
    first_layer: int
    num_layers: int
    valid_slots: int
    num_bytes: int
    checksum: int
    number: int
    first_slot: int = 0

    @property
    def key(self) -> SessionKey:
        """The session that the run belongs to."""
        return (self.session, self.attempt)


class RunBatch(NamedTuple):
    """Runs of the same layers of several blocks, all of one session.

    num_bytes: length of each run.
    positions, valid_slots: one each a block.
    """

    key: SessionKey
    rank: int
    group: int
    first_layer: int
    num_layers: int
    num_bytes: int
    positions: Sequence[int]
    valid_slots: Sequence[int]

    def header(self, index: int, checksum: int, number: int) -> RunHeader:
        """One of the runs by itself."""
        return RunHeader(
            *self.key, self.rank, self.group, self.positions[index], self.first_layer,
            self.num_layers, self.valid_slots[index], self.num_bytes, checksum, number,
        )  # fmt: skip

    @property
    def ranges(self) -> tuple[int, Sequence[int], int, int, Sequence[int]]:
        """What the runs bring, as `Coverage.admit_all` takes it."""
        return self.group, self.positions, self.first_layer, self.num_layers, self.valid_slots

    def overlaps(self, header: RunHeader) -> bool:
        """Whether a run of the same session carries some layer of one of the blocks."""
        return (
            header.group == self.group
            and header.position in self.positions
            and header.first_layer < self.first_layer + self.num_layers
            and self.first_layer < header.first_layer + header.num_layers
        )

    def part(self, wanted: Sequence[bool]) -> RunBatch:
        """Those of the runs that are wanted."""
        return self._replace(
            positions=list(compress(self.positions, wanted)),
            valid_slots=list(compress(self.valid_slots, wanted)),
        )


class RunAnswer(NamedTuple):
    """What a receiver says of a run after its bytes: in the pool, or no more of this session."""

    number: int
    is_admitted: bool


class RunPlaces:
    """Where runs lie inside blocks of a sender and a receiver of one rank each and equal layouts, and whether a header
    fits that.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        # (group, first layer, number of layers) -> place; only what the layout has gets in
        self._places: dict[tuple[int, int, int], Run] = {}

    def place(self, header: RunHeader) -> Run:
        """The run's bytes inside its block; TransferError unless every field fits the layout."""
        slots = header.valid_slots
        if header.first_slot:
            raise LayoutMismatch(f"run begins at slot {header.first_slot}; here runs begin at 0")
        return self._place(header, slots, slots)

    def check(self, batch: RunBatch) -> Run:
        """The same for runs of several blocks."""
        return self._place(batch, min(batch.valid_slots), max(batch.valid_slots))

    def check_late(self, header: RunHeader, block_bytes: int, *, had_plan: bool) -> None:
        """Raise unless a run that goes to scratch is one that its session could have had."""
        if not had_plan:
            self.place(header)
            return
        limit_bytes = _MAX_WIDENING * block_bytes
        if not 0 < header.num_bytes <= limit_bytes:
            raise LayoutMismatch(
                f"run is announced with {header.num_bytes} bytes; here at most {limit_bytes} are taken"
            )

    def _place(self, run: RunHeader | RunBatch, least_slots: int, most_slots: int) -> Run:
        key = (run.group, run.first_layer, run.num_layers)
        place = self._places.get(key)
        if place is None:
            self._check_layers(*key)
            place = self._places[key] = self._layout.layer_run(*key)
        if run.num_bytes != place.num_bytes:
            raise LayoutMismatch(
                f"run of {run.num_layers} layers is announced with {run.num_bytes} bytes; "
                f"here they are {place.num_bytes}"
            )
        if least_slots < 1 or most_slots > self._layout.block_size:
            wrong = least_slots if least_slots < 1 else most_slots
            raise LayoutMismatch(
                f"run names {wrong} valid slots; the block size is {self._layout.block_size}"
            )
        if run.rank:
            raise LayoutMismatch(f"run names rank {run.rank}; its session is of one rank")
        return place

    def _check_layers(self, group: int, first_layer: int, num_layers: int) -> None:
        groups = self._layout.groups
        if group >= len(groups):
            raise LayoutMismatch(f"run names group {group}; the layout has {len(groups)}")
        count, end_layer = len(groups[group].layers), first_layer + num_layers
        if num_layers < 1 or end_layer > count:
            raise LayoutMismatch(
                f"run names layers [{first_layer}, {end_layer}); the group has {count}"
            )
