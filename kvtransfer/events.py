"""What movers tell the engine thread.

Movers never change a block's state: they post one of these, and the engine thread acts on it.
Events of one session attempt are posted in the order in which they happened; an event may still be
in the inbox when its session has been forgotten or closed, so the engine ignores events of sessions
that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from core.errors import TransferError
from core.ids import BlockId, SessionId


class RunAdmitted(msgspec.Struct, frozen=True):
    """D: layers `[first_layer, first_layer + num_layers)` of one block are in the pool, whole and
    verified.

    The first one of a block is the moment for `BlockLife.begin_fill`. is_block_whole: with this run,
    every needed slot of every layer of the block has arrived.
    """

    session: SessionId
    attempt: int
    group: int
    position: int
    first_layer: int
    num_layers: int
    is_block_whole: bool

    @property
    def positions(self) -> Sequence[int]:
        """As of several blocks."""
        return (self.position,)

    @property
    def are_whole(self) -> Sequence[bool]:
        """As of several blocks."""
        return (self.is_block_whole,)


class RunsAdmitted(msgspec.Struct, frozen=True):
    """D: the same of several blocks at once; positions and are_whole have one entry each a block.

    Of sessions without a plan only, so never one rank's word beside others' (`rank_join`).
    """

    session: SessionId
    attempt: int
    group: int
    positions: Sequence[int]
    first_layer: int
    num_layers: int
    are_whole: Sequence[bool]


class SessionComplete(msgspec.Struct, frozen=True):
    """D: coverage of the session is complete; every byte is in the pool and verified. Posted once
    an attempt.
    """

    session: SessionId
    attempt: int


class WriterLeft(msgspec.Struct, frozen=True):
    """D: the last writer is out of a quarantined block; `BlockLife.settle` frees it."""

    block: BlockId


class ReceiveFailed(msgspec.Struct, frozen=True):
    """D: this attempt can never complete (checksum or protocol). Posted once; nothing of it is
    admitted after.
    """

    session: SessionId
    attempt: int
    error: TransferError


class BlocksAcknowledged(msgspec.Struct, frozen=True):
    """P: D has every layer of these blocks. The transport reads them for this session no more."""

    session: SessionId
    attempt: int
    group: int
    positions: tuple[int, ...]


class SendFailed(msgspec.Struct, frozen=True):
    """P: nothing more of this attempt will be sent: D refuses it or cannot be reached. Posted once.

    The engine still calls `close_session` and still waits for SessionDrained.
    """

    session: SessionId
    attempt: int
    error: TransferError


class SessionDrained(msgspec.Struct, frozen=True):
    """P: the answer to `close_session`: no byte of this attempt is read from the pool any more.
    Posted once.

    Comes soon, whatever D does: it waits for the mover thread, never for the peer.
    """

    session: SessionId
    attempt: int


MoverEvent = (
    RunAdmitted
    | RunsAdmitted
    | SessionComplete
    | WriterLeft
    | ReceiveFailed
    | BlocksAcknowledged
    | SendFailed
    | SessionDrained
)

PostEvent = Callable[[MoverEvent], None]
"""Puts an event into the engine thread's inbox. Called on mover threads; must not block and must
not raise.
"""
