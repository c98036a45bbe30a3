"""A run as it is announced and answered, whatever the transport."""

from __future__ import annotations

from typing import NamedTuple

from core.errors import LayoutMismatch, TransferError
from core.ids import SessionId
from core.kv_layout import KVLayout
from kvtransfer.session import SessionKey


class RunHeader(NamedTuple):
    """What a sender says of a run before its bytes. Nothing in it is trusted before `check_header`.

    rank: the rank whose shard it is.
    valid_slots: slots of the block that hold the sequence's KV in these layers.
    num_bytes, checksum: length and CRC-32C of the payload.
    number: the sender's name for the run, repeated in the answer.
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

    @property
    def key(self) -> SessionKey:
        """The session that the run belongs to."""
        return (self.session, self.attempt)


class RunAnswer(NamedTuple):
    """What a receiver says of a run after its bytes: in the pool, or no more of this session."""

    number: int
    is_admitted: bool


def check_header(header: RunHeader, layout: KVLayout) -> None:
    """Raise unless every field lies in the layout and the length is what the layout says."""
    if header.rank >= layout.num_ranks:
        raise TransferError(f"run names rank {header.rank}; this worker has {layout.num_ranks}")
    if header.group >= len(layout.groups):
        raise LayoutMismatch(f"run names group {header.group}; the layout has {len(layout.groups)}")
    num_layers = len(layout.groups[header.group].layers)
    end_layer = header.first_layer + header.num_layers
    if header.num_layers < 1 or end_layer > num_layers:
        raise LayoutMismatch(
            f"run names layers [{header.first_layer}, {end_layer}); the group has {num_layers}"
        )
    if not 1 <= header.valid_slots <= layout.block_size:
        raise LayoutMismatch(
            f"run names {header.valid_slots} valid slots; the block size is {layout.block_size}"
        )
    planned = layout.layer_run(header.group, header.first_layer, header.num_layers).num_bytes
    if header.num_bytes != planned:
        raise LayoutMismatch(
            f"run of {header.num_layers} layers is announced with {header.num_bytes} bytes; "
            f"here they are {planned}"
        )
