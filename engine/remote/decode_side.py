"""What D does with requests whose prompt another worker computes.

Owns every sequence in WAITING_FOR_KV and the attempt under way for it. Promises: blocks of a session are pinned and
reserved in one act or not at all; a permit is revoked before its blocks are given up, and before decode writes the
tail; a first token is relayed as soon as it is known, and only once however many attempts follow; every arrival ends
in the decode batch, in a local prefill, or in an abort. Runs on the engine thread only; never waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import compress

import msgspec

from core.blocks import BlockState
from core.errors import LayoutMismatch
from core.ids import BlockId, RequestId, SessionId
from core.kv_layout import KVLayout
from core.request import Request
from engine.channel import monotonic_ms
from engine.config import EngineConfig
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.storage import Staging
from engine.messages import (
    CallPrefill,
    ChoiceOutput,
    DeclinePrefill,
    EndPrefill,
    GrantPrefill,
    PrefillAnnounced,
    PrefillAnswered,
    PrefillLost,
    RoomForPrefill,
    ToFront,
)
from engine.remote.arrival import Arrival, ArrivalState
from engine.remote.timeline import Timeline
from engine.sampler.rows import Logprobs, SampledToken
from engine.scheduler.output import SequenceUpdate
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from kvtransfer.events import ReceiveFailed, RunAdmitted, RunsAdmitted, SessionComplete
from kvtransfer.plan import build_plan
from kvtransfer.session import Destination, IncomingPlan, ReceiveSession
from kvtransfer.transports.choice import Receivers

logger = logging.getLogger(__name__)


class DecodeCounters:
    """What became of sessions, since the start."""

    def __init__(self) -> None:
        self.opened = 0
        self.completed = 0
        self.failed = 0
        self.local_fallbacks = 0


class DecodeSide:
    """Arrivals of one decode (or mixed) worker."""

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        scheduler: Scheduler,
        pool: BlockPool,
        staging: Staging,
        receivers: Receivers,
        send: Callable[[ToFront], None],
        relay: Callable[[list[SequenceUpdate]], None],
    ) -> None:
        """send: to the front. relay: first tokens, to the client without waiting for KV."""
        self._config = config
        self._layout = layout
        self._scheduler = scheduler
        self._pool = pool
        self._life = pool.life
        self._staging = staging
        self._receivers = receivers
        self._send = send
        self._relay = relay
        self._arrivals: dict[SessionId, Arrival] = {}
        self._of_request: dict[RequestId, Arrival] = {}
        self.counters = DecodeCounters()

    @property
    def num_arrivals(self) -> int:
        """Sequences whose KV is awaited."""
        return len(self._arrivals)

    # ---- from the front

    def start(self, sequence: Sequence, candidates: Iterable[str], timeline: Timeline) -> None:
        """Take a new sequence and ask the first of its prefill candidates."""
        self._scheduler.add_arriving(sequence)  # refuses what can never be admitted
        arrival = Arrival(sequence, deque(candidates), timeline)
        self._arrivals[arrival.session] = arrival
        self._of_request[sequence.request.id] = arrival
        self._call_next(arrival)

    def announced(self, message: PrefillAnnounced) -> None:
        """P holds blocks for the whole prompt: pin and reserve ours in one act, or say "not now"."""
        arrival = self._current(message.session_id, message.attempt)
        if arrival is None or arrival.state is ArrivalState.GRANTED:
            return
        arrival.note_sign()
        arrival.timeline.mark("announced")
        try:
            arrival.plan = build_plan(message.layout, self._layout)
        except LayoutMismatch as error:
            logger.warning("%s: %s", arrival.candidate, error.message)
            self._attempt_failed(arrival, tell_prefill=True)
            return
        if self._is_next(arrival) and self._has_room(arrival) and self._reserve(arrival):
            self._grant(arrival)
        else:
            arrival.state = ArrivalState.DECLINED
            self._send(DeclinePrefill(arrival.session, arrival.attempt))

    def answered(self, message: PrefillAnswered) -> None:
        """P's first tokens: relay them unless an earlier attempt's have been, then admit when KV is whole."""
        arrival = self._current(message.session_id, message.attempt)
        if arrival is None:
            return
        arrival.note_sign()
        arrival.timeline.mark_first("first_token")
        if not arrival.has_first_tokens:
            tokens = self._first_tokens(arrival.sequence, message)
            if tokens is None:
                self._attempt_failed(arrival, tell_prefill=True)
                return
            arrival.has_first_tokens = True
            arrival.sequence.num_cached_tokens = max(
                arrival.sequence.num_cached_tokens, message.num_cached_tokens
            )
            self._relay(self._scheduler.accept_first_tokens(arrival.sequence, tokens))
        if arrival.sequence.is_finished:
            self._close(arrival, completed=False)
        else:
            self._admit_when_whole(arrival)

    def lost(self, message: PrefillLost) -> None:
        """This attempt yields nothing any more."""
        arrival = self._current(message.session_id, message.attempt)
        if arrival is not None:
            logger.warning("%s computes no prompt for us: %s", arrival.candidate, message.message)
            self._attempt_failed(arrival, tell_prefill=False)

    def abort(self, request_id: RequestId) -> None:
        """The request ends: give everything back at once. Ignores requests that are not arriving."""
        arrival = self._of_request.get(request_id)
        if arrival is not None:
            self._close(arrival, completed=False)

    # ---- from movers

    def runs_admitted(self, event: RunAdmitted | RunsAdmitted) -> None:
        """More layers of some blocks are in."""
        arrival = self._current(event.session, event.attempt)
        if arrival is None or arrival.permit is None:
            return
        arrival.note_runs(event.group, compress(event.positions, event.are_whole))
        blocks = arrival.sequence.block_table.ids(event.group)
        for block in [blocks[position] for position in event.positions]:
            if self._life.state(block) is BlockState.RESERVED:
                self._life.begin_fill(block)
            self._staging.bring_in(event.group, block, event.first_layer, event.num_layers)

    def complete(self, event: SessionComplete) -> None:
        """Every byte is in and verified."""
        arrival = self._current(event.session, event.attempt)
        if arrival is not None:
            arrival.is_covered = True
            arrival.timeline.mark("kv_complete")
            self._admit_when_whole(arrival)

    def receive_failed(self, event: ReceiveFailed) -> None:
        """This attempt can never be whole."""
        arrival = self._current(event.session, event.attempt)
        if arrival is not None:
            self._attempt_failed(arrival, tell_prefill=True)

    # ---- from the engine's loop

    def offer_room(self) -> None:
        """Tell P of the first declined session when there is room for it again."""
        for arrival in self._arrivals.values():
            if arrival.state is ArrivalState.DECLINED:
                if self._has_room(arrival):
                    arrival.state = ArrivalState.CALLED
                    arrival.note_sign()
                    self._send(RoomForPrefill(arrival.session, arrival.attempt))
                return

    def expire(self) -> None:
        """Give up granted attempts of which nothing has been heard for too long."""
        limit = monotonic_ms() - self._config.prefill_timeout_ms
        for arrival in list(self._arrivals.values()):
            if arrival.state is ArrivalState.GRANTED and arrival.last_sign_ms < limit:
                self._attempt_failed(arrival, tell_prefill=True)

    def check_integrity(self, num_other_permits: int = 0) -> None:
        """Raise AssertionError with the reason when arrivals, permits and the scheduler contradict each other.

        num_other_permits: live permits that are no arrival's.
        """
        arrivals = self._arrivals.values()
        assert len(self._of_request) == len(arrivals) == self._scheduler.num_arriving, (
            f"{len(arrivals)} arrivals, {self._scheduler.num_arriving} arriving sequences"
        )
        for arrival in arrivals:
            table = arrival.sequence.block_table
            if (permit := arrival.permit) is None:
                assert not table.num_held_blocks, "an arrival without a permit holds blocks"
                continue
            assert arrival.state is ArrivalState.GRANTED, f"a permit, {arrival.state.value}"
            assert self._life.is_live(permit), "an arrival's permit is revoked"
            expected = {block for ids in table.groups for block in ids[arrival.num_pinned_blocks :]}
            assert permit.generations.keys() == expected, "a permit for other blocks than reserved"
        num_permits = sum(arrival.permit is not None for arrival in arrivals)
        found = self._life.num_live_permits - num_other_permits
        assert found == num_permits, f"{found} live permits, {num_permits} granted arrivals"

    # ---- inside

    def _current(self, session: SessionId, attempt: int) -> Arrival | None:
        """The arrival, unless the session has ended or the attempt is an old one: late is ignored."""
        arrival = self._arrivals.get(session)
        return arrival if arrival is not None and arrival.attempt == attempt else None

    def _call_next(self, arrival: Arrival) -> None:
        arrival.begin_attempt()
        arrival.timeline.mark("prefill_called")
        self.counters.opened += 1
        self._send(
            CallPrefill(
                session_id=arrival.session,
                attempt=arrival.attempt,
                candidate=arrival.candidate,
                request=_with_remaining_time(arrival),
                num_held_tokens=self._scheduler.count_cached_tokens(arrival.sequence),
                session_secret=arrival.secret,
                lease_remaining_ms=self._config.session_lease_ms,
            )
        )

    def _is_next(self, arrival: Arrival) -> bool:
        """Whether no earlier session waits for room: a large one must not starve behind small ones."""
        for other in self._arrivals.values():
            if other is arrival:
                return True
            if other.state is ArrivalState.DECLINED:
                return False
        return True

    def _has_room(self, arrival: Arrival) -> bool:
        """Free blocks, and the cap on those of sequences that do not decode yet, which one alone may exceed."""
        if not self._scheduler.can_reserve(arrival.sequence):
            return False
        held = self._scheduler.num_undecoded_blocks
        cap = int(self._pool.num_usable * self._config.arriving_share)
        needed = self._scheduler.blocks_for_prompt(arrival.sequence)
        return held == 0 or held + needed <= cap

    def _reserve(self, arrival: Arrival) -> bool:
        """Pin what the pool holds of the prompt and reserve the rest; all or nothing."""
        sequence = arrival.sequence
        num_pinned_tokens = self._scheduler.pin_prefix(sequence, sequence.num_prompt_tokens)
        if not self._scheduler.reserve(sequence):
            self._scheduler.give_up_blocks(sequence, 0)
            return False
        arrival.num_pinned_blocks = num_pinned_tokens // self._config.block_size
        return True

    def _grant(self, arrival: Arrival) -> None:
        sequence = arrival.sequence
        arrival.state = ArrivalState.GRANTED
        arrival.timeline.mark("granted")
        destinations = self._destinations(arrival)
        blocks: list[BlockId] = [d.block for group in destinations for d in group]
        arrival.permit = self._life.grant(arrival.session, arrival.attempt, blocks)
        plan = arrival.plan
        assert plan is not None, "granted before P announced"
        incoming = None
        if not plan.is_identity:
            incoming = IncomingPlan(plan, rank=0, num_tokens=sequence.num_prompt_tokens)
        self._receivers.expect(
            ReceiveSession(
                arrival.session,
                arrival.attempt,
                arrival.secret,
                arrival.permit,
                destinations,
                incoming,
            )
        )
        first_missing = [arrival.num_pinned_blocks] * len(sequence.block_table.groups)
        self._send(GrantPrefill(arrival.session, arrival.attempt, first_missing))

    def _destinations(self, arrival: Arrival) -> tuple[tuple[Destination, ...], ...]:
        table = arrival.sequence.block_table
        num_tokens = arrival.sequence.num_prompt_tokens
        last = self._layout.num_blocks(num_tokens)
        return tuple(
            tuple(
                Destination(
                    position,
                    table.ids(group)[position],
                    self._layout.valid_slots(position, num_tokens),
                )
                for position in range(arrival.num_pinned_blocks, last)
            )
            for group in range(len(table.groups))
        )

    def _admit_when_whole(self, arrival: Arrival) -> None:
        """Into the decode batch, once both the first token and every byte are here."""
        if not (arrival.is_covered and arrival.has_first_tokens):
            return
        sequence = arrival.sequence
        self._end_writing(arrival)
        self._forget(arrival)
        self._send(EndPrefill(arrival.session, arrival.attempt, completed=True))
        self.counters.completed += 1
        arrival.timeline.mark("admitted")
        self._scheduler.admit_with_kv(sequence, sequence.num_prompt_tokens)

    def _attempt_failed(self, arrival: Arrival, *, tell_prefill: bool) -> None:
        """Give the attempt's blocks up, then turn to the next candidate, or compute here."""
        self.counters.failed += 1
        if tell_prefill:
            self._send(EndPrefill(arrival.session, arrival.attempt, completed=False))
        self._end_writing(arrival)
        num_verified = arrival.num_verified_blocks(self._layout)
        if arrival.candidates:
            self._scheduler.give_up_blocks(arrival.sequence, num_verified)
            self._scheduler.give_up_blocks(arrival.sequence, 0)  # verified ones stay findable
            self._call_next(arrival)
            return
        self.counters.local_fallbacks += 1
        self._forget(arrival)
        self._scheduler.return_to_local(arrival.sequence, num_verified)

    def _close(self, arrival: Arrival, *, completed: bool) -> None:
        """End the session for good; the scheduler's abort frees the sequence's blocks."""
        self._send(EndPrefill(arrival.session, arrival.attempt, completed=completed))
        self._end_writing(arrival)
        self._forget(arrival)
        self._scheduler.abort(arrival.sequence.request.id)

    def _first_tokens(
        self, sequence: Sequence, message: PrefillAnswered
    ) -> list[SampledToken] | None:
        """P's tokens in order of choice; None when they are not one possible token a choice."""
        outputs = sorted(message.first_outputs, key=lambda output: output.choice)
        if [output.choice for output in outputs] != list(range(sequence.num_choices)):
            return None
        vocab_size = self._scheduler.config.vocab_size
        if not all(len(o.token_ids) == 1 and 0 <= o.token_ids[0] < vocab_size for o in outputs):
            return None
        return [_as_sampled(output) for output in outputs]

    def _end_writing(self, arrival: Arrival) -> None:
        """From here on nobody writes for this attempt: only then may its blocks be freed or decoded into."""
        self._receivers.forget(arrival.session, arrival.attempt)
        if arrival.permit is not None:
            self._life.revoke(arrival.permit)
            arrival.permit = None

    def _forget(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.session]
        del self._of_request[arrival.sequence.request.id]


def _as_sampled(output: ChoiceOutput) -> SampledToken:
    """P's token as our own sampler would have given it."""
    logprobs = Logprobs(*msgspec.structs.astuple(output.logprobs[0])) if output.logprobs else None
    return SampledToken(output.token_ids[0], logprobs)


def _with_remaining_time(arrival: Arrival) -> Request:
    """The request as P must see it: what is left of its time, not what it had when it came here."""
    request = arrival.sequence.request
    if request.deadline_ms is None:
        return request
    remaining_ms = max(0, int(request.deadline_ms - arrival.timeline.elapsed_ms()))
    return replace(request, deadline_ms=remaining_ms)
