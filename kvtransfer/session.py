"""One request's KV on its way, as either side states it to its transport.

A session is named by (session, attempt): the next prefill candidate is a new attempt with a permit,
a secret and a coverage of its own, so that nothing of an earlier one can reach it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from core.blocks import Permit
from core.ids import BlockId, SessionId
from kvtransfer.plan import Extent, Piece, TransferPlan
from kvtransfer.routes import RankPair

SECRET_BYTES = 32
"""Length of a session's secret: drawn by D, sent to P over the control connection, shown by P on
the data connection.
"""

SessionKey = tuple[SessionId, int]
"""A session's id and its attempt: what names a session inside this package."""


class Destination(NamedTuple):
    """One of D's blocks that waits for bytes.

    position: the block's place in the sequence.
    block: the physical block; its generation is fenced by the session's permit.
    valid_slots: slots that the sequence fills in it; less than the block size for the last one
        only.
    """

    position: int
    block: BlockId
    valid_slots: int


class SourceBlock(NamedTuple):
    """One of P's blocks with layers to send.

    position: the block's place in the sequence.
    block: the physical block.
    valid_slots: slots that hold the sequence's KV in the layers that are sent.
    """

    position: int
    block: BlockId
    valid_slots: int


class IncomingPlan(NamedTuple):
    """What D knows of a session whose sender keeps KV another way, or has other ranks.

    rank: which of D's ranks takes in.
    num_tokens: tokens of the sequence that are to be held.
    """

    plan: TransferPlan
    rank: int
    num_tokens: int


class OutgoingPlan(NamedTuple):
    """The same of P, for one pair of ranks.

    first_tokens: for each KV group, the first token of the sequence that D lacks.
    """

    plan: TransferPlan
    pair: RankPair
    first_tokens: tuple[int, ...]
    num_tokens: int

    def pieces(
        self, group: int, block: SourceBlock, first_layer: int, num_layers: int
    ) -> list[Piece]:
        """What D's rank gets of some layers of a block; layers are places among those that P's rank holds."""
        extent = self._extent(group, block, first_layer, num_layers)
        return self.plan.pieces(self.pair, extent, self.num_tokens)

    def num_bytes(self, group: int, block: SourceBlock, first_layer: int, num_layers: int) -> int:
        """Bytes of `pieces` on the wire."""
        extent = self._extent(group, block, first_layer, num_layers)
        return self.plan.num_bytes(self.pair, extent, self.num_tokens)

    def _extent(self, group: int, block: SourceBlock, first_layer: int, num_layers: int) -> Extent:
        route = self.pair.routes[group]
        start = block.position * self.plan.source.block_size
        return Extent(
            group,
            first_layer + (route.source.share.layers.start if route else 0),
            num_layers,
            max(start, self.first_tokens[group]),
            start + block.valid_slots,
        )


@dataclass(frozen=True, slots=True)
class ReceiveSession:
    """D's side, stated when the blocks are granted.

    session, attempt: the name.
    secret: what a connection must show to write for this session.
    permit: the right to write into exactly the destination blocks.
    destinations: for each KV group, the blocks to fill; all empty when D lacks nothing.
    plan: None where runs keep their bytes and their place, from the only rank to the only rank.
    """

    session: SessionId
    attempt: int
    secret: bytes = field(repr=False)
    permit: Permit = field(repr=False)
    destinations: tuple[tuple[Destination, ...], ...]
    plan: IncomingPlan | None = None

    def __post_init__(self) -> None:
        _check_secret(self.secret)
        lacking = {d.block for group in self.destinations for d in group} - set(
            self.permit.generations
        )
        assert not lacking, f"session {self.session}: no permit for blocks {sorted(lacking)}"

    @property
    def key(self) -> SessionKey:
        """The session's name as one value."""
        return (self.session, self.attempt)


@dataclass(frozen=True, slots=True)
class SendSession:
    """P's side, stated when D has granted; once for each of D's ranks that gets something from this one.

    session, attempt: the name.
    secret: what is shown to D.
    address: a data endpoint of D's, one of its transport offer's addresses.
    plan: as on D's side.
    """

    session: SessionId
    attempt: int
    secret: bytes = field(repr=False)
    address: str
    plan: OutgoingPlan | None = None

    def __post_init__(self) -> None:
        _check_secret(self.secret)

    @property
    def key(self) -> SessionKey:
        """The session's name as one value."""
        return (self.session, self.attempt)


def _check_secret(secret: bytes) -> None:
    assert len(secret) == SECRET_BYTES, (
        f"session secret has {len(secret)} bytes, not {SECRET_BYTES}"
    )
