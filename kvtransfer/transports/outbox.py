"""P's bookkeeping, the same for every transport: what is to be sent, was sent, and has arrived.

Life of an outgoing run:

    push --> queued --taken--> unanswered --admitted--> gone (a block is acknowledged with its last run)
    unanswered --connection lost--> queued again, ahead of what was queued
    unanswered --refused--> gone, and its session failed
    any --session failed or closed--> gone

A session goes to one address, or to one a rank of D's. Those of one destination take turns, a run each. Everything
here but `pushed_bytes` belongs to one mover thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import TransferError
from core.kv_layout import KVLayout, Run
from kernels.host_memory import HostMemory, checksum_runs
from kvtransfer.codec import convert_slabs
from kvtransfer.counters import TransferCounters
from kvtransfer.events import BlocksAcknowledged, PostEvent, SendFailed, SessionDrained
from kvtransfer.plan import Piece
from kvtransfer.session import OutgoingPlan, SendSession, SessionKey, SourceBlock
from kvtransfer.transports.outgoing import (
    Lane,
    OutgoingRun,
    OutgoingSession,
    SentBlock,
    SentSession,
)
from kvtransfer.transports.runs import RunAnswer


def pushed_bytes(
    layout: KVLayout,
    plans: Sequence[OutgoingPlan | None],
    group: int,
    blocks: Sequence[SourceBlock],
    layers: tuple[int, int],
) -> int:
    """What a push puts on the wire, to all of a session's addresses."""
    num_bytes = 0
    for plan in plans:
        if plan is None:
            num_bytes += layout.layer_run(group, *layers).num_bytes * len(blocks)
        else:
            num_bytes += sum(plan.num_bytes(group, block, *layers) for block in blocks)
    return num_bytes


class Outbox:
    """All open sessions of a sender, by destination."""

    def __init__(
        self,
        pool: memoryview,
        layout: KVLayout,
        post: PostEvent,
        counters: TransferCounters,
        *,
        window_bytes: int,
        rank: int = 0,
        max_run_blocks: int = 1,
        max_run_bytes: int = 0,
        joins_pushes: bool = False,
    ) -> None:
        """pool: all bytes of what this rank holds, block after block.

        window_bytes: what of a session may be unanswered at one address before it has no turn there.
        max_run_blocks, max_run_bytes: how much one run may carry, beyond one block.
        joins_pushes: whether a run that waits for its turn carries what is pushed later as well. Not for runs whose
        bytes go over the connection: one that is lost half-way is lost whole.
        """
        self.lanes: dict[str, Lane] = {}
        self.counters = counters
        self.layout = layout
        self._window_bytes = window_bytes
        self._max_run_blocks, self._max_run_bytes = max_run_blocks, max_run_bytes
        self._joins_pushes = joins_pushes
        self._pool = pool
        self._memory = HostMemory(pool)
        self._block_bytes = layout.rank_block_bytes(rank)
        self._all_layers = [
            (1 << len(layout.rank_share(group, rank).layers)) - 1
            for group in range(len(layout.groups))
        ]
        self._post = post
        self._sessions: dict[SessionKey, SentSession] = {}
        self._num_runs = 0

    def open(self, session: SendSession) -> Lane:
        """Begin a session, or let it go to one address more; the lane that it joins."""
        lane = self.lanes.get(session.address)
        if lane is None:
            lane = self.lanes[session.address] = Lane(session.address, self._window_bytes)
        assert session.key not in lane.sessions, f"session {session.key} is open there already"
        whole = self._sessions.setdefault(session.key, SentSession(session.key))
        opened = lane.sessions[session.key] = OutgoingSession(session, lane, whole)
        whole.parts.append(opened)
        return lane

    def parts(self, key: SessionKey) -> list[OutgoingSession]:
        """The open session of this name, a part an address."""
        whole = self._sessions.get(key)
        return whole.parts if whole else []

    def push(
        self,
        key: SessionKey,
        group: int,
        blocks: Sequence[SourceBlock],
        layers: tuple[int, int],
        num_bytes: int,
    ) -> None:
        """Queue runs of some layers of some blocks; ignored when the session is over.

        num_bytes: `pushed_bytes`, which the counters know already.
        """
        whole = self._sessions.get(key)
        if whole is None or whole.is_failed:
            self.counters.settled_bytes_total += num_bytes
            return
        whole.num_unsettled_bytes += num_bytes
        first_layer, num_layers = layers
        pushed = ((1 << num_layers) - 1) << first_layer
        sent = self._note_blocks(whole, group, blocks)
        for block in sent:
            block.pushed_layers |= pushed
        for part in whole.parts:
            if room := self._room_in_last(part, group, layers):
                part.queue[-1].extend(blocks[:room], sent[:room])
            runs = self._runs(part, group, blocks[room:], sent[room:], layers)
            for block in (*sent[:room], *(block for run in runs for block in run.blocks)):
                block.num_runs += 1
            self._num_runs += len(runs)
            part.lane.enqueue(part, runs)
        self._acknowledge(whole, group, sent)  # of some, no address may want anything

    def _room_in_last(self, part: OutgoingSession, group: int, layers: tuple[int, int]) -> int:
        """How many blocks the run that waits last has room for, if it may carry more and carries the same layers."""
        if not self._joins_pushes or part.plan is not None or not part.queue:
            return 0
        last = part.queue[-1]
        if not last.carries(group, layers):
            return 0
        return max(0, self._most_blocks(last.place) - len(last.sources))

    def _most_blocks(self, place: Run) -> int:
        """How many blocks' bytes of this length one run carries."""
        return max(1, min(self._max_run_blocks, self._max_run_bytes // place.num_bytes))

    def _runs(
        self,
        part: OutgoingSession,
        group: int,
        sources: Sequence[SourceBlock],
        blocks: Sequence[SentBlock],
        layers: tuple[int, int],
    ) -> list[OutgoingRun]:
        if part.plan is not None:
            nowhere, plan = Run(0, 0), part.plan
            pieces = [
                (source, block, piece)
                for source, block in zip(sources, blocks, strict=True)
                for piece in plan.pieces(group, source, *layers)
            ]
            return [
                OutgoingRun(number, part, group, (source,), (block,), layers, nowhere, piece)
                for number, (source, block, piece) in enumerate(pieces, self._num_runs + 1)
            ]
        place = self.layout.layer_run(group, *layers)
        size = self._most_blocks(place)
        portions = [slice(start, start + size) for start in range(0, len(sources), size)]
        return [
            OutgoingRun(number, part, group, sources[portion], blocks[portion], layers, place)
            for number, portion in enumerate(portions, self._num_runs + 1)
        ]

    def payloads(self, run: OutgoingRun) -> list[memoryview]:
        """The bytes of a run, block by block: in the pool, or taken out of it where D has them in other places."""
        size = self._block_bytes
        if run.piece is not None:
            start = run.sources[0].block * size
            return [self._taken_out(run, run.piece, self._pool[start : start + size])]
        num_bytes = run.place.num_bytes
        return [self._pool[start : start + num_bytes] for start in self._starts(run)]

    def checksums(self, run: OutgoingRun) -> list[int]:
        """The CRC-32C of each block's bytes of a run that keeps its place."""
        return checksum_runs(self._memory, self._starts(run), run.place.num_bytes)

    def _starts(self, run: OutgoingRun) -> list[int]:
        size, offset_bytes = self._block_bytes, run.place.offset_bytes
        return [source.block * size + offset_bytes for source in run.sources]

    def _taken_out(self, run: OutgoingRun, piece: Piece, block: memoryview) -> memoryview:
        assert run.session.plan is not None
        data = memoryview(b"".join([block[start : start + n] for start, n in piece.source_runs]))
        ours, wire, _ = run.session.plan.plan.formats[run.group]
        return data if wire == ours else convert_slabs(data, piece.num_slots, ours, wire)

    def answered(self, lane: Lane, key: SessionKey, answer: RunAnswer, refusal: str) -> None:
        """D has spoken about a run of a session; unknown runs are ignored.

        refusal: what to say when the answer is no.
        """
        part = lane.sessions.get(key)
        run = lane.answered(part, answer.number) if part else None
        if part is None or run is None:
            return
        if not answer.is_admitted:
            self.fail(part, TransferError(refusal))
            return
        self._settle_bytes(part.whole, run.num_bytes)
        for block in run.blocks:
            block.num_runs -= 1
        self._acknowledge(part.whole, run.group, run.blocks)

    def fail(self, session: OutgoingSession, error: TransferError) -> None:
        """Send nothing more of a session, to no address, and say so once."""
        whole = session.whole
        if whole.is_failed:
            return
        whole.is_failed = True
        self._settle(whole)
        self._post(SendFailed(*whole.key, error))

    def fail_lane(self, lane: Lane, error: TransferError) -> None:
        """Fail every session of a destination that has something to send or to be answered."""
        for session in list(lane.sessions.values()):
            if session.queue or session.unanswered:
                self.fail(session, error)

    def close_session(self, key: SessionKey) -> None:
        """Drop a session. The caller has seen to it that no bytes of it are on their way."""
        whole = self._sessions.pop(key, None)
        if whole is None:
            return
        self._settle(whole)
        for part in whole.parts:
            del part.lane.sessions[key]
        self._post(SessionDrained(*key))

    def close(self) -> None:
        """Let go of the pool's memory; nothing is posted."""
        self._pool = memoryview(b"")
        self._memory = HostMemory(self._pool)
        for whole in self._sessions.values():
            for part in whole.parts:
                part.lane.drop(part)
        self._sessions.clear()
        self.lanes.clear()

    def _settle(self, whole: SentSession) -> None:
        for part in whole.parts:
            part.lane.drop(part)
        self.counters.blocks_outstanding -= whole.num_unacknowledged_blocks
        whole.num_unacknowledged_blocks = 0
        self._settle_bytes(whole, whole.num_unsettled_bytes)

    def _settle_bytes(self, whole: SentSession, num_bytes: int) -> None:
        whole.num_unsettled_bytes -= num_bytes
        self.counters.settled_bytes_total += num_bytes

    def _note_blocks(
        self, whole: SentSession, group: int, sources: Sequence[SourceBlock]
    ) -> list[SentBlock]:
        known, before, noted = whole.blocks, len(whole.blocks), []
        for position, _, _ in sources:
            if (block := known.get((group, position))) is None:
                block = known[group, position] = SentBlock(position)
            noted.append(block)
        whole.num_unacknowledged_blocks += len(known) - before
        self.counters.blocks_outstanding += len(known) - before
        return noted

    def _acknowledge(self, whole: SentSession, group: int, blocks: Sequence[SentBlock]) -> None:
        """Say of each block that D has all of it, once, when it does."""
        all_layers = self._all_layers[group]
        there = [
            block
            for block in blocks
            if not block.num_runs
            and block.pushed_layers == all_layers
            and not block.is_acknowledged
        ]
        if not there:
            return
        whole.num_unacknowledged_blocks -= len(there)
        self.counters.blocks_outstanding -= len(there)
        self.counters.blocks_acknowledged_total += len(there)
        for block in there:
            block.is_acknowledged = True
        positions = tuple([block.position for block in there])
        self._post(BlocksAcknowledged(*whole.key, group, positions))
