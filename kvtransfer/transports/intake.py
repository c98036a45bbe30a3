"""D's rules, the same for every transport: who may write, where, and what counts as arrived.

Life of an incoming run:

    begin --every byte lacking, session live--> writing  --last byte, checksum right--> admitted
    begin --covered already-------------------> draining --last byte--> answered as admitted
    begin --session ended---------------------> draining --last byte--> answered as refused
    writing --session or permit ended---------> draining
    writing --the same range begun elsewhere--> draining: the newer of two connections writes
    any --connection lost---------------------> abandoned: nothing of it counts

Runs of several blocks may come as one batch, which is written whole or not begun:

    enter_batch --every byte lacking, nobody else writes--> inside --all there--> leave_batch: admitted, each if intact
    inside --more to come--> pause_batch --enter_batch again--> inside, or lost: the rest to scratch, judge_batch
    paused --a newer connection begins--> lost
    enter_batch --anything else--> taken run by run

A slice is written between `IncomingRun.next_slice`, which enters the block, and `IncomingRun.wrote`, which leaves it.
Whether a session still stands is looked at and the block entered in one critical section, which `forget` shares: after
`forget` no slice begins, nothing is admitted and no event of the session is posted. A slice that is inside goes on to
its end, counted by the block's life.

`expect` and `forget` belong to the engine thread, the rest to mover threads; a run to one of them.
"""

from __future__ import annotations

import hmac
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from core.blocks import BlockLife
from core.errors import ChecksumMismatch, TransferError
from core.ids import BlockId, SessionId
from core.kv_layout import KVLayout
from kernels.host_memory import HostMemory
from kvtransfer.counters import TransferCounters
from kvtransfer.events import (
    PostEvent,
    ReceiveFailed,
    RunAdmitted,
    RunsAdmitted,
    SessionComplete,
    WriterLeft,
)
from kvtransfer.session import ReceiveSession, SessionKey
from kvtransfer.transports.base import MAX_SLICE_BYTES
from kvtransfer.transports.incoming_run import (
    EndedSession,
    Fate,
    IncomingRun,
    LiveSession,
    OpenOutcome,
)
from kvtransfer.transports.planned_run import PlannedRun
from kvtransfer.transports.runs import UNCHECKED, RunAnswer, RunBatch, RunHeader, RunPlaces

MAX_ENDED_SESSIONS = 4096
"""Ended sessions that are remembered, so that a late peer is told from a stranger."""


class Intake:
    """The sessions that a worker expects over any of its receivers, and the only way into their blocks."""

    def __init__(
        self,
        life: BlockLife,
        pool: memoryview,
        layout: KVLayout,
        post: PostEvent,
        rank: int = 0,
    ) -> None:
        """pool: all bytes of what this rank holds, block after block."""
        self.block_bytes = layout.rank_block_bytes(rank)
        self.life = life
        self.pool = pool
        self.memory = HostMemory(pool)
        self.counters = TransferCounters()
        self._scratch = threading.local()  # two movers would spoil each other's checksums
        self._layout = layout
        self._places = RunPlaces(layout)
        self._post = post
        self._lock = threading.Lock()
        self._live: dict[SessionKey, LiveSession] = {}
        self._ended: OrderedDict[SessionKey, EndedSession] = OrderedDict()

    # ---- engine thread

    def expect(self, session: ReceiveSession) -> None:
        """Let runs of this session in; complete at once when it lacks nothing."""
        live = LiveSession(session, self._layout)
        with self._lock:
            assert session.key not in self._live, f"session {session.key} is expected already"
            self._live[session.key] = live
            if live.coverage.is_complete:
                self._post(SessionComplete(session.session, session.attempt))

    def forget(self, session: SessionId, attempt: int) -> None:
        """End a session; see the module's promise. Idempotent."""
        with self._lock:
            live = self._live.pop((session, attempt), None)
            if live is not None:
                ended = EndedSession(live.session.secret, live.session.plan is not None)
                self._ended[session, attempt] = ended
                while len(self._ended) > MAX_ENDED_SESSIONS:
                    self._ended.popitem(last=False)

    # ---- mover threads

    def close(self) -> None:
        """Let go of the pool's memory. No mover may be under way any more."""
        self.pool = memoryview(b"")
        self.memory = HostMemory(self.pool)

    def fail_all(self, error: TransferError) -> None:
        """Fail every expected session."""
        with self._lock:
            for live in self._live.values():
                self._fail(live, error)

    def open(self, key: SessionKey, secret: bytes) -> OpenOutcome:
        """Whether a peer that shows this secret may send runs of the session."""
        with self._lock:
            live = self._live.get(key)
            known = live.session if live else self._ended.get(key)
            is_failed = live is None or live.is_failed
        if known is None or not hmac.compare_digest(known.secret, secret):
            return OpenOutcome.STRANGER
        return OpenOutcome.ENDED if is_failed else OpenOutcome.ACCEPTED

    def is_expected(self, key: SessionKey) -> bool:
        """Whether a session has been expected and not yet forgotten."""
        with self._lock:
            return key in self._live

    def has_plan(self, key: SessionKey) -> bool:
        """Whether an expected session has a plan."""
        with self._lock:
            live = self._live.get(key)
            return live is not None and live.session.plan is not None

    def is_batch_inside(self, key: SessionKey) -> bool:
        """Whether a batch of the session is inside its blocks."""
        with self._lock:
            live = self._live.get(key)
            return live is not None and live.batch_inside is not None

    def offset_bytes(self, group: int, first_layer: int, num_layers: int) -> int:
        """Where in a block a run of these layers lies."""
        return self._layout.layer_run(group, first_layer, num_layers).offset_bytes

    @property
    def scratch(self) -> memoryview:
        """Where this thread puts what is not for the pool: MAX_SLICE_BYTES bytes."""
        if not hasattr(self._scratch, "view"):
            self._scratch.view = memoryview(bytearray(MAX_SLICE_BYTES))
        view: memoryview = self._scratch.view
        return view

    def count(self, **amounts: int) -> None:
        """Add to counters, by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def begin(self, header: RunHeader, *, is_opened: bool) -> IncomingRun:
        """Take up a run; it goes to scratch unless this peer has opened its session.

        Raises TransferError when the header fits no plan; the session has failed then, and the
        connection with its bytes of unknown length has to be closed.
        """
        with self._lock:
            live = self._live.get(header.key) if is_opened else None
            if live is None or live.is_failed:
                ended = self._ended.get(header.key)
                had_plan = live.session.plan is not None if live else ended and ended.had_plan
                self._places.check_late(header, self.block_bytes, had_plan=bool(had_plan))
                return IncomingRun(self, header, None, Fate.LATE)
            try:
                run = self._new_run(header, live)
            except TransferError as error:
                self._fail(live, error)
                raise
            parts = live.coverage.lacking_layers(*run.cells)
            if parts and self._has_displaced(run, live):
                live.writing.append(run)
                run.aim(live.blocks[header.group][header.position], parts)
            else:
                run.fate = Fate.COVERED
            return run

    def _new_run(self, header: RunHeader, live: LiveSession) -> IncomingRun:
        if live.session.plan is None:
            return IncomingRun(self, header, live, Fate.WRITING, self._places.place(header))
        piece = live.piece_of(header)
        formats = live.session.plan.plan.formats[header.group]
        return PlannedRun(self, header, live, piece, formats)

    def _has_displaced(self, run: IncomingRun, live: LiveSession) -> bool:
        """Take the range over from older connections. Never two writers at a time: where one is
        inside a slice now, it goes on and this one does not.
        """
        rivals = [other for other in live.writing if other.overlaps(run)]
        inside = live.batch_inside
        if (inside and inside.overlaps(run.header)) or any(other.is_inside for other in rivals):
            return False
        live.batch_link = None
        for other in rivals:
            other.fate = Fate.COVERED
            live.writing.remove(other)
        return True

    def enter_batch(
        self, batch: RunBatch, link: object, *, is_opened: bool, is_begun: bool = False
    ) -> list[BlockId] | None:
        """Go into the blocks of all runs for one slice, or into none.

        link: the connection that brings it; a newer one takes the session's blocks over. is_begun: a slice of the batch
        is there already. The blocks, in the batch's order; `pause_batch` or `leave_batch` must follow. None where some
        run is late, covered in part or as a whole, or written by another connection: a batch that is not begun is
        then taken run by run. Raises TransferError as `begin`.
        """
        with self._lock:
            live = self._live.get(batch.key) if is_opened else None
            if live is None or live.is_failed or live.writing or live.batch_inside:
                return None
            if live.session.plan is not None or (is_begun and live.batch_link is not link):
                return None
            try:
                self._places.check(batch)
            except TransferError as error:
                self._fail(live, error)
                raise
            if not live.coverage.lacks_all(*batch.ranges[:4]):
                return None
            blocks = [*map(live.blocks[batch.group].__getitem__, batch.positions)]
            entered = self.life.enter_all(live.session.permit, blocks)
            if all(entered) and len(set(blocks)) == len(blocks):
                live.batch_link, live.batch_inside = link, batch
                return blocks
            self._leave_all(block for block, yes in zip(blocks, entered, strict=True) if yes)
            return None

    def _leave_all(self, blocks: Iterable[BlockId]) -> None:
        for block in self.life.leave_all(blocks):
            self._post(WriterLeft(block))

    def pause_batch(self, batch: RunBatch, blocks: Sequence[BlockId]) -> None:
        """Let a batch that is not all there out of its blocks."""
        with self._lock:
            self._leave_all(blocks)
            if (live := self._live.get(batch.key)) is not None:
                live.batch_inside = None

    def abandon_batch(self, batch: RunBatch, link: object) -> None:
        """Nothing more of a batch will come over this connection, and nothing of it counts."""
        with self._lock:
            live = self._live.get(batch.key)
            if live is not None and live.batch_link is link:
                live.batch_link = None

    def judge_batch(self, batch: RunBatch, number: int) -> RunAnswer | None:
        """What to answer to a batch that went to scratch after it was begun; see `finish`."""
        with self._lock:
            live = self._live.get(batch.key)
            if live is None or live.is_failed:
                self.counters.late_runs_total += len(batch.positions)
                return RunAnswer(number, False)
            self.counters.duplicate_runs_total += len(batch.positions)
            group, positions, first, count, slots = batch.ranges
            is_lacking = any(
                live.coverage.lacking_layers(group, position, first, count, end)
                for position, end in zip(positions, slots, strict=True)
            )
            return None if is_lacking else RunAnswer(number, True)

    def leave_batch(
        self, batch: RunBatch, blocks: Sequence[BlockId], intact: Sequence[bool]
    ) -> bool:
        """Let the runs out of their blocks and admit those that are intact; whether all of them are in the pool."""
        with self._lock:
            self._leave_all(blocks)
            live = self._live.get(batch.key)
            if live is not None:
                live.batch_link = live.batch_inside = None
            if live is None or live.is_failed:
                self.counters.late_runs_total += len(blocks)
                return False
            there = batch if all(intact) else batch.part(intact)
            if there.positions:
                self._admit_batch(live, there)
            self.counters.late_runs_total += len(blocks) - len(there.positions)
            return there is batch

    def _admit_batch(self, live: LiveSession, batch: RunBatch) -> None:
        group, positions, first, count, _ = batch.ranges
        whole = live.coverage.admit_all(*batch.ranges)
        self._post(RunsAdmitted(*batch.key, group, positions, first, count, whole))
        self.counters.admitted_runs_total += len(whole)
        if live.coverage.is_complete:
            self._post(SessionComplete(*batch.key))

    def enter(self, run: IncomingRun) -> bool:
        """Let a run into its block for one slice; False when it has lost the right to write."""
        with self._lock:
            live = run.live
            if run.fate is not Fate.WRITING or live is None or not self._stands(live):
                return False
            run.is_inside = self.life.enter(live.session.permit, run.block)
            return run.is_inside

    def leave(self, run: IncomingRun) -> None:
        """Let a run out of its block."""
        with self._lock:
            self._leave(run)

    def _leave(self, run: IncomingRun) -> None:
        run.is_inside = False
        if self.life.leave(run.block):
            self._post(WriterLeft(run.block))

    def abandon(self, run: IncomingRun) -> None:
        """Nothing more of this run will come, and nothing of it counts."""
        with self._lock:
            self._release(run)

    def finish(self, run: IncomingRun) -> RunAnswer | None:
        """All bytes of a run have come: let it out of its block, and judge it.

        The answer, or None when another run answers for it.
        """
        header, live = run.header, run.live
        with self._lock:
            if run.is_inside:
                self._leave(run)
            self._release(run)
            if live is None or not self._stands(live) or run.fate is Fate.LATE:
                self.counters.late_runs_total += 1
                return RunAnswer(header.number, False)
            if run.fate is Fate.COVERED:
                self.counters.duplicate_runs_total += 1
                is_covered = not live.coverage.lacking_layers(*run.cells)
                is_coming = any(other.overlaps(run) for other in live.writing)
                is_coming |= live.batch_inside is not None
                return (
                    None if is_coming and not is_covered else RunAnswer(header.number, is_covered)
                )
            if header.checksum not in (run.checksum, UNCHECKED):
                self._fail_checksum(live, header, run.checksum)
                return RunAnswer(header.number, False)
            self._admit(live, run)
            return RunAnswer(header.number, True)

    def _stands(self, live: LiveSession) -> bool:
        return not live.is_failed and self._live.get(live.session.key) is live

    def _release(self, run: IncomingRun) -> None:
        assert not run.is_inside, "a run is let go between slices only"
        if run.live is not None and run in run.live.writing:
            run.live.writing.remove(run)

    def _admit(self, live: LiveSession, run: IncomingRun) -> None:
        live.coverage.admit(*run.cells)
        self.counters.admitted_runs_total += 1
        is_whole = live.coverage.is_block_whole(*run.cells[:2])
        self._post(RunAdmitted(*run.header.key, *run.cells[:4], is_whole))
        if live.coverage.is_complete:
            self._post(SessionComplete(*run.header.key))

    def check_batch(
        self,
        batch: RunBatch,
        found: Sequence[int],
        announced: Sequence[int],
        intact: Sequence[bool],
    ) -> None:
        """Fail the session of a batch for the first run that is still meant and not what was announced."""
        for index, (ours, theirs, is_meant) in enumerate(
            zip(found, announced, intact, strict=True)
        ):
            if is_meant and ours != theirs:
                with self._lock:
                    if (live := self._live.get(batch.key)) is not None:
                        self._fail_checksum(live, batch.header(index, theirs, 0), ours)
                return

    def _fail_checksum(self, live: LiveSession, header: RunHeader, found: int) -> None:
        self.counters.checksum_errors_total += 1
        message = (
            f"run of block position {header.position}, layers from {header.first_layer}: "
            f"CRC-32C announced {header.checksum:#010x}, received {found:#010x}"
        )
        self._fail(live, ChecksumMismatch(message))

    def _fail(self, live: LiveSession, error: TransferError) -> None:
        if not live.is_failed:
            live.is_failed = True
            self._post(ReceiveFailed(live.session.session, live.session.attempt, error))
