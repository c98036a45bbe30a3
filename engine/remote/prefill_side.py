"""What P does with prompts that it computes for decode workers.

    QUEUED    no block is held; waits for its turn, or for D to have room
    ANNOUNCED blocks for the whole prompt are held; D has been told
    GRANTED   chunks run; finished layer ranges are on their way
    DRAINING  the session has ended; blocks stay pinned until the mover reads them no more

Promises: a session holds blocks for its whole prompt or none; nothing is computed before D has reserved; blocks
stay pinned while any byte of them may still be read; every session ends in D's word, a lost stream, a failed link or
an expired lease. Runs on the engine thread only; never waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from core.errors import LayoutMismatch, ServeError, TransferError
from core.kv_identity import KVIdentity, identity_differences
from core.kv_layout import KVLayout
from engine.channel import monotonic_ms
from engine.kvcache.storage import Staging
from engine.messages import (
    AddPrefill,
    AnnouncePrefill,
    ChoiceOutput,
    FirstTokens,
    PrefillDeclined,
    PrefillEnded,
    PrefillGranted,
    PrefillRenewed,
    PrefillRoom,
    RefusePrefill,
    ToFront,
)
from engine.outbox import token_logprobs
from engine.scheduler.output import SchedulerOutput, SequenceUpdate
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from kvtransfer.events import SendFailed, SessionDrained
from kvtransfer.plan import TransferPlan, build_plan
from kvtransfer.session import SECRET_BYTES, OutgoingPlan, SessionKey, SourceBlock
from kvtransfer.transports.choice import Offer, Senders

logger = logging.getLogger(__name__)


class SessionState(Enum):
    """Where a session is; see the top of this file."""

    QUEUED = "queued"
    ANNOUNCED = "announced"
    GRANTED = "granted"
    DRAINING = "draining"


@dataclass(slots=True)
class PrefillSession:
    """One attempt of one session of some decode worker.

    plan: how our KV becomes D's.
    offers: ways to reach D, best first; the first one is in use once the session is granted.
    first_tokens: for each KV group, the first token that D lacks.
    expires_ms: when the lease ends, on this engine's clock.
    """

    key: SessionKey
    sequence: Sequence
    secret: bytes
    plan: TransferPlan
    offers: list[Offer]
    expires_ms: float
    state: SessionState = SessionState.QUEUED
    first_tokens: tuple[int, ...] = ()

    @property
    def lacks_blocks(self) -> bool:
        """Whether D lacks any block of the prompt."""
        num_tokens = self.sequence.num_prompt_tokens
        return any(first < num_tokens for first in self.first_tokens)

    def outgoing_plans(self) -> list[OutgoingPlan]:
        """What each of D's ranks gets from our only one; none where runs keep their bytes and their place."""
        if self.plan.is_identity:
            return []
        return [
            OutgoingPlan(self.plan, pair, self.first_tokens, self.sequence.num_prompt_tokens)
            for pair in self.plan.pairs
        ]


class PrefillSide:
    """Sessions of one prefill (or mixed) worker."""

    def __init__(
        self,
        scheduler: Scheduler,
        staging: Staging,
        senders: Senders,
        send: Callable[[ToFront], None],
        identity: KVIdentity,
        layout: KVLayout,
        look_up: Callable[[Sequence], bool],
    ) -> None:
        """look_up: loads what tiers have of a session's prompt; whether the session is held for that."""
        self._look_up = look_up
        self._scheduler = scheduler
        self._staging = staging
        self._senders = senders
        self._send = send
        self._identity = identity
        self._layout = layout
        self._sessions: dict[SessionKey, PrefillSession] = {}
        self._of_sequence: dict[int, PrefillSession] = {}
        self._num_exposed_bytes = 0
        self.exposed_bytes_total = 0
        """KV bytes that were not yet acknowledged when the last kernel of a prompt had ended."""

    @property
    def num_sessions(self) -> int:
        """Sessions that have not wholly ended."""
        return len(self._sessions)

    # ---- from the front

    def add(self, message: AddPrefill, sequence: Sequence) -> None:
        """Queue a session; raises the ServeError that refuses it, with both sides' values named."""
        plan, offers = self._check(message)
        self._scheduler.add_session(sequence)
        session = PrefillSession(
            key=(message.session_id, message.attempt),
            sequence=sequence,
            secret=message.session_secret,
            plan=plan,
            offers=offers,
            expires_ms=monotonic_ms() + message.lease_remaining_ms,
        )
        self._sessions[session.key] = session
        self._of_sequence[id(sequence)] = session

    def granted(self, message: PrefillGranted) -> None:
        """D has reserved: blocks that are here already leave at once, the rest as they are computed."""
        session = self._sessions.get((message.session_id, message.attempt))
        if session is None or session.state is not SessionState.ANNOUNCED:
            return
        if len(message.first_missing_block) != len(self._layout.groups):
            found, wanted = len(message.first_missing_block), len(self._layout.groups)
            self._fail(session.key, TransferError(f"grant names {found} groups, not {wanted}"))
            return
        session.state = SessionState.GRANTED
        size = session.plan.destination.block_size
        session.first_tokens = tuple(first * size for first in message.first_missing_block)
        if session.lacks_blocks:
            self._send_computed(session)
        self._scheduler.open_gate(session.sequence)

    def declined(self, message: PrefillDeclined) -> None:
        """D has no room: give the blocks back, so that neither side waits while holding."""
        session = self._sessions.get((message.session_id, message.attempt))
        if session is not None and session.state is SessionState.ANNOUNCED:
            self._scheduler.drop_blocks(session.sequence)
            session.state = SessionState.QUEUED

    def room(self, message: PrefillRoom) -> None:
        """D has room again: the session is due at its old place in the queue."""
        session = self._sessions.get((message.session_id, message.attempt))
        if session is not None and session.state is SessionState.QUEUED:
            self._scheduler.unpark(session.sequence)

    def renewed(self, message: PrefillRenewed) -> None:
        """D still wants the session."""
        session = self._sessions.get((message.session_id, message.attempt))
        if session is not None:
            session.expires_ms = monotonic_ms() + message.lease_remaining_ms

    def ended(self, message: PrefillEnded) -> None:
        """D needs nothing more of this session."""
        session = self._sessions.get((message.session_id, message.attempt))
        if session is not None:
            self._end(session)

    # ---- from movers

    def send_failed(self, event: SendFailed) -> None:
        """The link to D is gone or D refuses: what is computed goes over the next transport, if D offered one."""
        session = self._sessions.get((event.session, event.attempt))
        if session is None or session.state is not SessionState.GRANTED:
            return
        failed = session.offers.pop(0)
        if session.offers:
            logger.warning("session %d leaves %s: %s", event.session, failed.kind, event.error)
            self._send_computed(session)
        else:
            self._fail(session.key, event.error)

    def drained(self, event: SessionDrained) -> None:
        """No byte of the session is read any more: its blocks may go."""
        session = self._sessions.get((event.session, event.attempt))
        if session is not None and session.state is SessionState.DRAINING:
            self._release(session)

    # ---- from the engine's loop

    def announce_next(self) -> None:
        """One step ahead of their turn: take blocks for whole prompts, all or none, and tell D."""
        for sequence in self._scheduler.sessions_due():
            if self._look_up(sequence):
                continue
            if not self._scheduler.take_blocks(sequence):
                return
            session = self._of_sequence[id(sequence)]
            session.state = SessionState.ANNOUNCED
            self._send(AnnouncePrefill(*session.key, sequence.num_cached_tokens))

    def layers_done(self, output: SchedulerOutput, first_layer: int, num_layers: int) -> None:
        """Layers `[first_layer, first_layer + num_layers)` of the running step are in the pool, or queued to be: send
        what they fill.

        A block leaves in the step that fills its last slot; the partly filled last block leaves with the prompt's
        last chunk.
        """
        size = self._layout.block_size
        for item in output.items:
            session = self._of_sequence.get(id(item.sequence))
            if session is None or not session.lacks_blocks:
                continue
            end = item.start + item.num_tokens
            last = end // size
            if end == item.sequence.num_prompt_tokens:
                last = -(-end // size)
            self._push(session, item.start // size, last, first_layer, num_layers)

    def step_computed(self) -> None:
        """A step's last kernel has ended."""
        self._num_exposed_bytes = self._senders.counters.bytes_outstanding

    def first_tokens(self, sequence: Sequence, updates: list[SequenceUpdate]) -> None:
        """The prompt is computed: answer D with the first token of each choice."""
        session = self._of_sequence[id(sequence)]
        self.exposed_bytes_total += self._num_exposed_bytes
        self._num_exposed_bytes = 0
        outputs = [
            ChoiceOutput(
                request_id=sequence.request.id,
                choice=update.choice,
                token_ids=[token.token_id for token in update.tokens],
                logprobs=token_logprobs(update.tokens),
            )
            for update in updates
        ]
        num_cached = sequence.num_cached_tokens
        self._send(FirstTokens(*session.key, outputs, num_cached, session.lacks_blocks))

    def expire(self) -> None:
        """End sessions whose lease has run out."""
        now = monotonic_ms()
        for session in list(self._sessions.values()):
            if session.expires_ms < now and session.state is not SessionState.DRAINING:
                self._fail(session.key, ServeError("the session's lease ran out"))

    def check_integrity(self) -> None:
        """Raise AssertionError with the reason when sessions and the scheduler contradict each other."""
        sessions = self._sessions.values()
        assert len(self._of_sequence) == len(sessions) == self._scheduler.num_sessions, (
            f"{len(sessions)} sessions, {self._scheduler.num_sessions} of the scheduler"
        )
        for session in sessions:
            num_held = session.sequence.block_table.num_held_blocks
            is_queued = session.state is SessionState.QUEUED
            assert is_queued != bool(num_held), f"{num_held} blocks held, {session.state.value}"

    # ---- inside

    def _check(self, message: AddPrefill) -> tuple[TransferPlan, list[Offer]]:
        """How to push and where to, best first; raises LayoutMismatch when no KV may or can be exchanged."""
        if (message.session_id, message.attempt) in self._sessions:
            raise TransferError(f"session {message.session_id}: attempt {message.attempt} is open")
        if len(message.session_secret) != SECRET_BYTES:
            found = len(message.session_secret)
            raise TransferError(f"session secret has {found} bytes, not {SECRET_BYTES}")
        if any(message.request.output_token_ids):
            raise TransferError("a session's request has output tokens already")
        if differences := identity_differences(self._identity, message.identity):
            raise LayoutMismatch("KV identity differs: " + "; ".join(differences))
        plan = build_plan(self._layout, message.layout)
        offers = [Offer(t.kind, t.addresses) for t in message.transports]
        if usable := self._senders.usable(offers, plan):
            return plan, usable
        offered = ", ".join(offer.kind for offer in message.transports) or "none"
        ours = ", ".join(self._senders.kinds)
        reason = "" if plan.is_identity else "; layouts differ, which not every transport carries"
        raise LayoutMismatch(f"transports: ours {ours}, theirs {offered}{reason}")

    def _send_computed(self, session: PrefillSession) -> None:
        """Over its best way, all that is there between two steps; the rest follows as it is computed."""
        plans = session.outgoing_plans()
        self._senders.open(session.key, session.secret, session.offers[0], plans)
        sequence, size = session.sequence, self._layout.block_size
        num_computed = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        last = num_computed // size
        if num_computed == sequence.num_prompt_tokens:
            last = -(-num_computed // size)
        self._push(session, 0, last, 0, None)

    def _push(
        self,
        session: PrefillSession,
        first: int,
        last: int,
        first_layer: int,
        num_layers: int | None,
    ) -> None:
        """Enqueue positions `[first, last)` of every group; num_layers None sends whole blocks."""
        if session.state is not SessionState.GRANTED:
            return
        sequence = session.sequence
        size = self._layout.block_size
        for group, first_token in enumerate(session.first_tokens):
            blocks = [
                SourceBlock(
                    position,
                    sequence.block_table.ids(group)[position],
                    self._layout.valid_slots(position, sequence.num_prompt_tokens),
                )
                for position in range(max(first, first_token // size), last)
            ]
            count = len(self._layout.groups[group].layers) if num_layers is None else num_layers
            if blocks:
                ids = [source.block for source in blocks]
                self._staging.bring_out(group, ids, first_layer, count)
                self._senders.push(*session.key, group, blocks, first_layer, count)

    def _refuse(self, key: SessionKey, error: ServeError) -> None:
        self._send(RefusePrefill(*key, type(error).__name__, error.message))

    def _fail(self, key: SessionKey, error: ServeError) -> None:
        session = self._sessions.get(key)
        if session is not None and session.state is not SessionState.DRAINING:
            self._refuse(key, error)
            self._end(session)

    def _end(self, session: PrefillSession) -> None:
        """Stop computing; release at once when nothing is being read, else when the mover has drained."""
        if session.state is SessionState.DRAINING:
            return
        was_sending = session.state is SessionState.GRANTED and session.lacks_blocks
        session.state = SessionState.DRAINING
        if was_sending:
            self._scheduler.halt(session.sequence)
            self._senders.close_session(*session.key)
        else:
            self._release(session)

    def _release(self, session: PrefillSession) -> None:
        self._scheduler.release(session.sequence)
        del self._sessions[session.key]
        del self._of_sequence[id(session.sequence)]
