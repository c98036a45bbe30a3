"""The contract of every transport: what the engine calls, and who may free which block when.

D (Receiver):
    life.grant -> expect(session) ... RunAdmitted, RunsAdmitted ... SessionComplete
    at completion, abort and before a new attempt, on the engine thread, in this order:
        receiver.forget(session, attempt); life.revoke(permit); life.abort(block) for what is given up
    A write is a slice of at most MAX_SLICE_BYTES or COPY_SLICE_BYTES, inside the block's writer count.
    Where an engine reads (nixl, mooncake), one block or COPY_SLICE_BYTES are a write, which ends when
    the engine says so.
    `forget` does not wait for a slice that is inside already: `life.abort` then answers QUARANTINED,
    and WriterLeft(block) follows. A block that was aborted to FREE has no writer and gets none.

P (Sender):
    open(session) -> push ... BlocksAcknowledged ... -> close_session -> SessionDrained
    Bytes are read from the pool on the mover thread, at any time between `push` and the block's
    BlocksAcknowledged or the session's SessionDrained (a lost connection makes runs be sent again).
    So a pushed block must stay pinned and its sent layers unchanged until one of the two has been
    posted, or `Sender.close` has returned.

All methods belong to the engine thread and none of them waits for a peer. `post` is called on mover
threads, and on the engine thread from inside `expect`, when nothing is lacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.ids import SessionId
from kvtransfer.counters import TransferCounters
from kvtransfer.session import ReceiveSession, SendSession, SourceBlock

MAX_SLICE_BYTES = 1024 * 1024
"""Most bytes that one write puts into a block between two looks at its permit."""

COPY_SLICE_BYTES = 4 * 1024 * 1024
"""The same for a write that this process copies by itself, so that no peer can hold it up inside."""


class Receiver(Protocol):
    """D's end: writes what arrives into the pool, under permits, each range once."""

    @property
    def kind(self) -> str:
        """The transport's name in offers."""
        ...

    @property
    def addresses(self) -> list[str]:
        """Where senders reach this end, one address a rank."""
        ...

    @property
    def counters(self) -> TransferCounters:
        """Live counters of this end."""
        ...

    def expect(self, session: ReceiveSession) -> None:
        """Let runs of this session in from now on. Posts SessionComplete at once when nothing is
        lacking.
        """
        ...

    def forget(self, session: SessionId, attempt: int) -> None:
        """From the return on, no write of it begins, nothing of it is admitted, no event of it is
        posted. Idempotent.

        Runs of it that come later go to scratch, are counted, and are answered "refused".
        """
        ...

    def stop(self) -> None:
        """Take in nothing more; sessions stand, for other ends that share them. Idempotent."""
        ...

    def close(self) -> None:
        """Stop for good: no write happens after the return. Idempotent."""
        ...


class Sender(Protocol):
    """P's end: sends runs of its pool's blocks, and learns what D holds."""

    @property
    def kind(self) -> str:
        """The transport's name in offers."""
        ...

    @property
    def counters(self) -> TransferCounters:
        """Live counters of this end."""
        ...

    @property
    def carries_plans(self) -> bool:
        """Whether sessions with a plan may be opened; without one, runs keep their bytes and their place."""
        ...

    def reaches(self, address: str) -> bool:
        """Whether an address may be reached from here; False only where trying is in vain."""
        ...

    def open(self, session: SendSession) -> None:
        """Begin a session; the connection is made when there is something to send.

        Once for each address, where several of D's ranks get something. What is pushed goes to all of them, as far as
        each wants it; a block is acknowledged when all have it, and the session fails and ends as one.
        """
        ...

    def push(
        self,
        session: SessionId,
        attempt: int,
        group: int,
        blocks: Sequence[SourceBlock],
        first_layer: int,
        num_layers: int,
    ) -> None:
        """Enqueue layers `[first_layer, first_layer + num_layers)` of these blocks; returns at
        once, copies nothing.

        Layers are places among those that this end's rank holds of the group. A layer of a block
        is pushed when all its valid slots are written. Ignored for a session that has failed.
        """
        ...

    def close_session(self, session: SessionId, attempt: int) -> None:
        """End a session: what is queued is dropped, SessionDrained follows. Ignored when it is not
        open.
        """
        ...

    def close(self) -> None:
        """Stop: nothing is read from the pool after the return. Idempotent."""
        ...
