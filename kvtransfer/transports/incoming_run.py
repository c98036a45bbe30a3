"""A session that is expected, and one run of it on its way in: slice by slice into the pool, or to scratch."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple, Protocol

from core.errors import LayoutMismatch
from core.ids import NULL_BLOCK, BlockId
from core.kv_layout import KVLayout, Run
from kernels.host_memory import checksum
from kvtransfer.coverage import Coverage
from kvtransfer.plan import Cells, Piece
from kvtransfer.session import ReceiveSession
from kvtransfer.transports.base import MAX_SLICE_BYTES
from kvtransfer.transports.runs import UNCHECKED, RunAnswer, RunBatch, RunHeader


class Fate(Enum):
    """What becomes of a run's bytes: into the pool, or to scratch since it is covered or late."""

    WRITING = auto()
    COVERED = auto()
    LATE = auto()


class OpenOutcome(Enum):
    """What becomes of a peer that shows a secret for a session."""

    ACCEPTED = auto()
    ENDED = auto()
    STRANGER = auto()


class LiveSession:
    """An expected session: where its blocks are, what has arrived, who writes."""

    __slots__ = (
        "batch_inside",
        "batch_link",
        "blocks",
        "coverage",
        "is_failed",
        "session",
        "writing",
    )

    def __init__(self, session: ReceiveSession, layout: KVLayout) -> None:
        self.session = session
        plan = session.plan
        self.coverage = Coverage(
            [{d.position: d.valid_slots for d in group} for group in session.destinations],
            plan.plan.num_layers(plan.rank) if plan else [len(g.layers) for g in layout.groups],
            plan.plan.num_shares(plan.rank) if plan else None,
        )
        self.blocks: list[dict[int, BlockId]] = [
            {destination.position: destination.block for destination in group}
            for group in session.destinations
        ]
        self.writing: list[IncomingRun] = []
        self.batch_link: object = None  # the connection that is at a batch
        self.batch_inside: RunBatch | None = None  # the one that is inside its blocks
        self.is_failed = False

    def piece_of(self, header: RunHeader) -> Piece:
        """What a run of a session with a plan brings; LayoutMismatch unless every field fits the plan."""
        incoming = self.session.plan
        assert incoming is not None, f"session {self.session.key} has no plan"
        plan, rank, num_tokens = incoming
        pair = plan.pair(header.rank, rank)
        route = pair.routes[header.group] if header.group < len(pair.routes) else None
        share = route.part if route else 0
        piece = plan.piece_of(pair, Cells(*header[3:8], header.first_slot, share), num_tokens)
        num_bytes = piece.num_bytes(plan.formats[header.group].wire)
        if header.num_bytes != num_bytes:
            raise LayoutMismatch(
                f"run of {piece.cells} is announced with {header.num_bytes} bytes; by its plan they are {num_bytes}"
            )
        return piece


class EndedSession(NamedTuple):
    """What is remembered of a session that is expected no more."""

    secret: bytes
    had_plan: bool


class Gate(Protocol):
    """What a run asks of the `Intake` that it comes in through."""

    pool: memoryview
    block_bytes: int

    @property
    def scratch(self) -> memoryview:
        """See Intake.scratch."""
        ...

    def enter(self, run: IncomingRun) -> bool:
        """See Intake.enter."""
        ...

    def leave(self, run: IncomingRun) -> None:
        """See Intake.leave."""
        ...

    def finish(self, run: IncomingRun) -> RunAnswer | None:
        """See Intake.finish."""
        ...

    def count(self, **amounts: int) -> None:
        """See Intake.count."""
        ...


class IncomingRun:
    """One run on its way in. Its bytes go, in order, where `next_slice` says."""

    __slots__ = (
        "_base_bytes", "_intake", "_parts", "_slice", "answer", "block", "cells", "checksum", "fate",
        "header", "is_inside", "live", "num_bytes_left", "slice_offset_bytes",
    )  # fmt: skip

    def __init__(
        self,
        intake: Gate,
        header: RunHeader,
        live: LiveSession | None,
        fate: Fate,
        place: Run | None = None,
    ) -> None:
        """place: where in its block it lies; None for a run that no block of ours is for."""
        self.header = header
        self.cells = cells_of(header)
        self.live = live
        self.fate = fate
        self.num_bytes_left = header.num_bytes
        self.block = NULL_BLOCK
        self.is_inside = False
        self.checksum = 0
        self.answer: RunAnswer | None = None
        self._intake = intake
        self._slice = intake.scratch
        self._base_bytes = (
            place.offset_bytes if place else 0
        )  # of the payload's first byte, in the pool
        self.slice_offset_bytes = 0  # of the slice in the pool, where it is one of it
        # half-open byte ranges of the payload that go into the pool; the rest goes to scratch
        self._parts: list[tuple[int, int]] = []

    def aim(self, block: BlockId, parts: list[tuple[int, int]]) -> None:
        """Let these parts of the run, as `(first layer, count)`, go to their place in a block."""
        header = self.header
        self.block = block
        self._base_bytes += block * self._intake.block_bytes
        layer_bytes = header.num_bytes // header.num_layers
        for first, count in parts:
            start = (first - header.first_layer) * layer_bytes
            self._parts.append((start, start + count * layer_bytes))

    def overlaps(self, other: IncomingRun) -> bool:
        """Whether both runs carry something of the same cells."""
        ours, theirs = self.cells, other.cells
        return (ours.group, ours.position, ours.share) == (
            theirs.group, theirs.position, theirs.share
        ) and (
            ours.first_layer < theirs.first_layer + theirs.num_layers
            and theirs.first_layer < ours.first_layer + ours.num_layers
            and ours.first_slot < theirs.end_slot
            and theirs.first_slot < ours.end_slot
        )  # fmt: skip

    def next_slice(self, max_bytes: int = MAX_SLICE_BYTES) -> memoryview:
        """Where the next bytes go, at most `max_bytes`; `wrote` must follow before anything."""
        start = self.header.num_bytes - self.num_bytes_left
        end, is_pool = self._stretch(start)
        if is_pool and not self._intake.enter(self):
            if self.fate is Fate.WRITING:
                self.fate = Fate.LATE
            end, is_pool = self.header.num_bytes, False
        size = min(end - start, max_bytes)
        if is_pool:
            place = self.slice_offset_bytes = self._base_bytes + start
            self._slice = self._intake.pool[place : place + size]
        else:
            self._slice = self._intake.scratch[: min(size, MAX_SLICE_BYTES)]
        return self._slice

    def wrote(self, num_bytes: int) -> None:
        """The transport has put this many bytes into the slice (none, when nothing had come).

        With the last ones the run is over, and `answer` is what to tell the sender, if anything.
        """
        if num_bytes:
            if self.fate is Fate.WRITING and self.header.checksum != UNCHECKED:
                self.checksum = checksum(self._slice[:num_bytes], self.checksum)
            self.num_bytes_left -= num_bytes
            self._intake.count(received_bytes_total=num_bytes)
        if not self.num_bytes_left:
            self.answer = self._intake.finish(self)
        elif self.is_inside:
            self._intake.leave(self)

    def _stretch(self, start: int) -> tuple[int, bool]:
        """The end of the stretch of bytes that begins at `start`, and whether it is for the pool."""
        if self.fate is Fate.WRITING:
            for first, end in self._parts:
                if start < first:
                    return first, False
                if start < end:
                    return end, True
        return self.header.num_bytes, False


def cells_of(header: RunHeader) -> Cells:
    """The range of coverage that a run of a session without a plan brings."""
    return Cells(*header[3:8], 0, 0)
