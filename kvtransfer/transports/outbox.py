"""P's bookkeeping, the same for every transport: what is to be sent, was sent, and has arrived.

Life of an outgoing run:

    push --> queued --taken--> unanswered --admitted--> gone (a block is acknowledged with its last layers)
    unanswered --connection lost--> queued again, ahead of what was queued
    unanswered --refused--> gone, and its session failed
    any --session failed or closed--> gone

Sessions of one destination take turns, a run each. Everything here but `note_push` belongs to one mover thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from crc32c import crc32c

from core.errors import TransferError
from core.kv_layout import KVLayout, Run
from kvtransfer.counters import TransferCounters
from kvtransfer.events import BlockAcknowledged, PostEvent, SendFailed, SessionDrained
from kvtransfer.session import SendSession, SessionKey, SourceBlock
from kvtransfer.transports.runs import RunAnswer, RunHeader


class OutgoingRun:
    """One run on its way out: its name, and the layers of some blocks that it carries."""

    __slots__ = ("first_layer", "group", "num_layers", "number", "place", "session", "sources")

    def __init__(
        self,
        number: int,
        session: OutgoingSession,
        group: int,
        sources: Sequence[SourceBlock],
        layers: tuple[int, int],
        place: Run,
    ) -> None:
        self.number = number
        self.session = session
        self.group = group
        self.sources = sources
        self.first_layer, self.num_layers = layers
        self.place = place  # inside each block

    @property
    def num_bytes(self) -> int:
        """Bytes that it carries."""
        return self.place.num_bytes * len(self.sources)

    def header(self, payload: memoryview) -> RunHeader:
        """What announces a run of one block. Reads the payload for its checksum."""
        (source,) = self.sources
        return RunHeader(
            *self.session.key,
            0,  # rank
            self.group,
            source.position,
            self.first_layer,
            self.num_layers,
            source.valid_slots,
            len(payload),
            crc32c(payload),
            self.number,
        )


class OutgoingSession:
    """One open session of a sender."""

    __slots__ = ("acknowledged_layers", "is_failed", "key", "lane", "num_unacknowledged_blocks",
                 "num_unsettled_bytes", "queue", "secret", "unanswered")  # fmt: skip

    def __init__(self, session: SendSession, lane: Lane) -> None:
        self.key: SessionKey = session.key
        self.secret = session.secret
        self.lane = lane
        self.queue: deque[OutgoingRun] = deque()
        self.unanswered: dict[int, OutgoingRun] = {}
        # (group, position) -> bit set of acknowledged layers, for every block ever pushed
        self.acknowledged_layers: dict[tuple[int, int], int] = {}
        self.num_unacknowledged_blocks = 0
        self.num_unsettled_bytes = 0
        self.is_failed = False


class Lane:
    """The sessions that send to one address; those with queued runs stand in a ring."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sessions: dict[SessionKey, OutgoingSession] = {}
        self.ring: deque[OutgoingSession] = deque()

    def enqueue(self, session: OutgoingSession, runs: Sequence[OutgoingRun]) -> None:
        """Add runs to the end of a session's queue."""
        if runs and not session.queue:
            self.ring.append(session)
        session.queue.extend(runs)

    def has_runs(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self.ring)

    def needs_link(self) -> bool:
        """Whether something waits to be sent or answered."""
        return bool(self.ring) or any(s.unanswered for s in self.sessions.values())

    def next_session(self) -> OutgoingSession:
        """Whose turn it is; only when `has_runs`."""
        return self.ring[0]

    def take(self) -> OutgoingRun:
        """The next run, which is unanswered from now on; only when `has_runs`."""
        session = self.ring.popleft()
        run = session.queue.popleft()
        if session.queue:
            self.ring.append(session)
        session.unanswered[run.number] = run
        return run

    def requeue(self) -> None:
        """The connection is lost: everything unanswered is to be sent again, oldest first."""
        for session in self.sessions.values():
            runs = list(session.unanswered.values())
            session.unanswered.clear()
            if runs and not session.queue:
                self.ring.append(session)
            session.queue.extendleft(reversed(runs))

    def drop(self, session: OutgoingSession) -> None:
        """Send nothing more of a session, and expect no answer."""
        if session.queue:
            self.ring.remove(session)
        session.queue.clear()
        session.unanswered.clear()


class Outbox:
    """All open sessions of a sender, by destination."""

    def __init__(
        self,
        pool: memoryview,
        layout: KVLayout,
        post: PostEvent,
        counters: TransferCounters,
        *,
        max_run_blocks: int = 1,
        max_run_bytes: int = 0,
    ) -> None:
        """max_run_blocks, max_run_bytes: how much one run may carry, beyond one block."""
        self.lanes: dict[str, Lane] = {}
        self.counters = counters
        self._max_run_blocks, self._max_run_bytes = max_run_blocks, max_run_bytes
        self._pool = pool
        self._layout = layout
        self._post = post
        self._sessions: dict[SessionKey, OutgoingSession] = {}
        self._num_runs = 0

    def open(self, session: SendSession) -> Lane:
        """Begin a session; the lane that it joins."""
        assert session.key not in self._sessions, f"session {session.key} is open already"
        lane = self.lanes.setdefault(session.address, Lane(session.address))
        opened = OutgoingSession(session, lane)
        lane.sessions[session.key] = self._sessions[session.key] = opened
        return lane

    def find(self, key: SessionKey) -> OutgoingSession | None:
        """The open session of this name."""
        return self._sessions.get(key)

    def note_push(self, group: int, num_blocks: int, first_layer: int, num_layers: int) -> None:
        """Count what is about to be pushed. On the pushing thread."""
        place = self._layout.layer_run(group, first_layer, num_layers)
        self.counters.pushed_bytes_total += place.num_bytes * num_blocks

    def push(
        self,
        key: SessionKey,
        group: int,
        blocks: Sequence[SourceBlock],
        first_layer: int,
        num_layers: int,
    ) -> None:
        """Queue runs that `note_push` has counted; ignored when the session is over."""
        place = self._layout.layer_run(group, first_layer, num_layers)
        session = self._sessions.get(key)
        if session is None or session.is_failed:
            self.counters.settled_bytes_total += place.num_bytes * len(blocks)
            return
        layers = (first_layer, num_layers)
        for source in blocks:
            self._note_block(session, group, source.position)
        size = max(1, min(self._max_run_blocks, self._max_run_bytes // place.num_bytes))
        parts = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        runs = [
            OutgoingRun(number, session, group, sources, layers, place)
            for number, sources in enumerate(parts, self._num_runs + 1)
        ]
        self._num_runs += len(runs)
        session.num_unsettled_bytes += place.num_bytes * len(blocks)
        session.lane.enqueue(session, runs)

    def payloads(self, run: OutgoingRun) -> list[memoryview]:
        """The bytes of a run in the pool, block by block."""
        size, num_bytes = self._layout.block_bytes, run.place.num_bytes
        starts = [source.block * size + run.place.offset_bytes for source in run.sources]
        return [self._pool[start : start + num_bytes] for start in starts]

    def answered(self, key: SessionKey, answer: RunAnswer, refusal: str) -> None:
        """D has spoken about a run of a session; unknown runs are ignored.

        refusal: what to say when the answer is no.
        """
        session = self._sessions.get(key)
        run = session.unanswered.pop(answer.number, None) if session else None
        if session is None or run is None:
            return
        if not answer.is_admitted:
            self.fail(session, TransferError(refusal))
            return
        self._acknowledge(session, run)

    def fail(self, session: OutgoingSession, error: TransferError) -> None:
        """Send nothing more of a session, and say so once."""
        if session.is_failed:
            return
        session.is_failed = True
        self._settle(session)
        self._post(SendFailed(*session.key, error))

    def fail_lane(self, lane: Lane, error: TransferError) -> None:
        """Fail every session of a destination that has something to send or to be answered."""
        for session in list(lane.sessions.values()):
            if session.queue or session.unanswered:
                self.fail(session, error)

    def close_session(self, key: SessionKey) -> None:
        """Drop a session. The caller has seen to it that no bytes of it are on their way."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self._settle(session)
        del session.lane.sessions[key]
        self._post(SessionDrained(*key))

    def close(self) -> None:
        """Let go of the pool's memory; nothing is posted."""
        self._pool = memoryview(b"")
        for session in self._sessions.values():
            session.lane.drop(session)
        self._sessions.clear()
        self.lanes.clear()

    def _settle(self, session: OutgoingSession) -> None:
        session.lane.drop(session)
        self.counters.blocks_outstanding -= session.num_unacknowledged_blocks
        session.num_unacknowledged_blocks = 0
        self._settle_bytes(session, session.num_unsettled_bytes)

    def _settle_bytes(self, session: OutgoingSession, num_bytes: int) -> None:
        session.num_unsettled_bytes -= num_bytes
        self.counters.settled_bytes_total += num_bytes

    def _note_block(self, session: OutgoingSession, group: int, position: int) -> None:
        if (group, position) not in session.acknowledged_layers:
            session.acknowledged_layers[group, position] = 0
            session.num_unacknowledged_blocks += 1
            self.counters.blocks_outstanding += 1

    def _acknowledge(self, session: OutgoingSession, run: OutgoingRun) -> None:
        whole = (1 << len(self._layout.groups[run.group].layers)) - 1
        arrived = ((1 << run.num_layers) - 1) << run.first_layer
        self._settle_bytes(session, run.num_bytes)
        for source in run.sources:
            place = (run.group, source.position)
            before = session.acknowledged_layers[place]
            after = session.acknowledged_layers[place] = before | arrived
            if after == whole and before != whole:
                session.num_unacknowledged_blocks -= 1
                self.counters.blocks_outstanding -= 1
                self.counters.blocks_acknowledged_total += 1
                self._post(BlockAcknowledged(*session.key, *place))
