"""A run, a session and a destination as a sender keeps them; what becomes of them is decided in `outbox`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from core.kv_layout import Run
from kernels.host_memory import checksum
from kvtransfer.plan import Piece
from kvtransfer.session import OutgoingPlan, SendSession, SessionKey, SourceBlock
from kvtransfer.transports.runs import RunHeader


class OutgoingRun:
    """One run on its way out: its name, and the layers of some blocks that it carries.

    blocks: what is known of each of them.
    place: where in each block it lies. Where D has it elsewhere, `piece` says what it is there, and the block is one.
    """

    __slots__ = (
        "blocks", "first_layer", "group", "num_bytes", "num_layers", "number", "piece", "place", "session", "sources",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        session: OutgoingSession,
        group: int,
        sources: Sequence[SourceBlock],
        blocks: Sequence[SentBlock],
        layers: tuple[int, int],
        place: Run,
        piece: Piece | None = None,
    ) -> None:
        self.number = number
        self.session = session
        self.group = group
        self.sources = sources
        self.blocks = blocks
        self.first_layer, self.num_layers = layers
        self.place = place
        self.piece = piece
        self.num_bytes = place.num_bytes * len(sources)  # on the wire
        if piece is not None:
            assert session.plan is not None
            self.num_bytes = piece.num_bytes(session.plan.plan.formats[group].wire)

    def carries(self, group: int, layers: tuple[int, int]) -> bool:
        """Whether it carries these layers of a group."""
        return (self.group, self.first_layer, self.num_layers) == (group, *layers)

    def extend(self, sources: Sequence[SourceBlock], blocks: Sequence[SentBlock]) -> None:
        """Carry more blocks, to the same places. Only while it waits for its turn."""
        self.sources = (*self.sources, *sources)
        self.blocks = (*self.blocks, *blocks)
        self.num_bytes += self.place.num_bytes * len(sources)

    def header(self, payload: memoryview) -> RunHeader:
        """What announces a run of one block. Reads the payload for its checksum."""
        (source,) = self.sources
        if self.piece is not None:
            assert self.session.plan is not None
            return RunHeader(
                *self.session.key,
                self.session.plan.pair.source_rank,
                *self.piece.cells[:5],
                len(payload),
                checksum(payload),
                self.number,
                self.piece.cells.first_slot,
            )
        return RunHeader(
            *self.session.key,
            0,  # rank
            self.group,
            source.position,
            self.first_layer,
            self.num_layers,
            source.valid_slots,
            len(payload),
            checksum(payload),
            self.number,
        )


class SentBlock:
    """How much of one block is pushed, and how many of its runs D does not yet have."""

    __slots__ = ("is_acknowledged", "num_runs", "position", "pushed_layers")

    def __init__(self, position: int) -> None:
        self.position = position
        self.pushed_layers = 0  # a bit set
        self.num_runs = 0
        self.is_acknowledged = False


class SentSession:
    """What all of D's ranks together have of a session's blocks."""

    __slots__ = (
        "blocks",
        "is_failed",
        "key",
        "num_unacknowledged_blocks",
        "num_unsettled_bytes",
        "parts",
    )

    def __init__(self, key: SessionKey) -> None:
        self.key = key
        self.parts: list[OutgoingSession] = []
        self.blocks: dict[
            tuple[int, int], SentBlock
        ] = {}  # (group, position) -> every block ever pushed
        self.num_unacknowledged_blocks = 0
        self.num_unsettled_bytes = 0
        self.is_failed = False


class OutgoingSession:
    """One open session of a sender, as it goes to one address."""

    __slots__ = (
        "is_in_ring", "lane", "num_unanswered_bytes", "plan", "queue", "secret", "unanswered", "whole",
    )  # fmt: skip

    def __init__(self, session: SendSession, lane: Lane, whole: SentSession) -> None:
        self.secret = session.secret
        self.plan: OutgoingPlan | None = session.plan
        self.lane = lane
        self.whole = whole
        self.queue: deque[OutgoingRun] = deque()
        self.unanswered: dict[int, OutgoingRun] = {}
        self.num_unanswered_bytes = 0
        self.is_in_ring = False

    @property
    def key(self) -> SessionKey:
        """The session's name."""
        return self.whole.key


class Lane:
    """The sessions that send to one address; those that have queued runs, and may send one, stand in a ring.

    A session whose receiver has left `window_bytes` unanswered waits for an answer, while others go on.
    """

    def __init__(self, address: str, window_bytes: int) -> None:
        self.address = address
        self._window_bytes = window_bytes
        self.sessions: dict[SessionKey, OutgoingSession] = {}
        self.ring: deque[OutgoingSession] = deque()

    def enqueue(self, session: OutgoingSession, runs: Sequence[OutgoingRun]) -> None:
        """Add runs to the end of a session's queue."""
        session.queue.extend(runs)
        self._give_turn(session)

    def has_runs(self) -> bool:
        """Whether something may be sent now."""
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
        session.is_in_ring = False
        run = session.queue.popleft()
        session.unanswered[run.number] = run
        session.num_unanswered_bytes += run.num_bytes
        self._give_turn(session)
        return run

    def answered(self, session: OutgoingSession, number: int) -> OutgoingRun | None:
        """The run of this number, which is answered now; None where it was not unanswered."""
        run = session.unanswered.pop(number, None)
        if run is not None:
            session.num_unanswered_bytes -= run.num_bytes
            self._give_turn(session)
        return run

    def requeue(self) -> None:
        """The connection is lost: everything unanswered is to be sent again, oldest first."""
        for session in self.sessions.values():
            session.queue.extendleft(reversed(session.unanswered.values()))
            session.unanswered.clear()
            session.num_unanswered_bytes = 0
            self._give_turn(session)

    def drop(self, session: OutgoingSession) -> None:
        """Send nothing more of a session, and expect no answer."""
        if session.is_in_ring:
            self.ring.remove(session)
            session.is_in_ring = False
        session.queue.clear()
        session.unanswered.clear()
        session.num_unanswered_bytes = 0

    def _give_turn(self, session: OutgoingSession) -> None:
        """Let a session stand in the ring while it has runs, and its window has room for one more."""
        has_room = session.num_unanswered_bytes < self._window_bytes
        if session.queue and has_room and not session.is_in_ring:
            self.ring.append(session)
            session.is_in_ring = True
