"""The engine's loop: hear, plan, run, tell.

One thread decides everything: messages from the front and events from movers come through one inbox, a step runs to
its end between two looks into it. Promises: every accepted request ends in a finish reason or a named error; one
StepDone a step carries all its tokens and cache events, in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from core.errors import ServeError, WorkerLostError
from core.ids import BlockId, RequestId
from core.kv_identity import KVIdentity
from core.kv_layout import KVLayout
from engine.channel import Inbox, InboxItem, monotonic_ms
from engine.config import EngineConfig
from engine.integrity import IdleCheck, check_writers
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.storage import Storage
from engine.messages import (
    AbortRequest,
    AddPrefill,
    AddRequest,
    EngineStopped,
    PrefillAnnounced,
    PrefillAnswered,
    PrefillDeclined,
    PrefillEnded,
    PrefillGranted,
    PrefillLost,
    PrefillRenewed,
    PrefillRoom,
    RefusePrefill,
    ResetPrefixCache,
    Shutdown,
    SnapshotTaken,
    TakeSnapshot,
    ToFront,
)
from engine.offload.offload import Offload
from engine.outbox import Outbox
from engine.remote.decode_side import DecodeSide
from engine.remote.prefill_side import PrefillSide
from engine.remote.timeline import Timeline
from engine.report import Reporter
from engine.runner.forward_batch import BatchBuilder, BatchItem
from engine.runner.model_runner import ModelRunner
from engine.sampler.build import build_rows
from engine.sampler.sampler import Sampler
from engine.scheduler.output import SchedulerOutput, SequenceUpdate
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, start_sequences
from kvtransfer.events import (
    BlocksAcknowledged,
    ReceiveFailed,
    RunAdmitted,
    RunsAdmitted,
    SendFailed,
    SessionComplete,
    SessionDrained,
    WriterLeft,
)
from kvtransfer.transports.choice import Receivers, Senders

_IDLE_WAIT_S = 0.25


class EngineCore:
    """Port of one engine: items in through the inbox, messages out through `send`."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        inbox: Inbox,
        send: Callable[[ToFront], None],
        identity: KVIdentity,
        layout: KVLayout,
        scheduler: Scheduler,
        pool: BlockPool,
        storage: Storage,
        runner: ModelRunner,
        sampler: Sampler,
        eos_token_ids: frozenset[int],
        receivers: Receivers,
        senders: Senders,
        offload: Offload,
    ) -> None:
        self._config = config
        self._inbox = inbox
        self._send = send
        self._scheduler = scheduler
        self._pool = pool
        self._storage = storage
        self._runner, self._batches = runner, BatchBuilder(config.block_size)
        self._sampler = sampler
        self._eos_token_ids = eos_token_ids
        self._receivers, self._senders = receivers, senders
        self._outbox = Outbox()
        self._deadlines: list[tuple[float, RequestId]] = []
        self._stop_at_ms: float | None = None
        self._decode_side = DecodeSide(
            config, layout, scheduler, pool, storage, receivers, send, self._relay
        )
        self._offload = offload
        self._prefill_side = PrefillSide(
            scheduler, storage, senders, send, identity, layout, self._offload.look_up
        )
        self._idle_check = IdleCheck(scheduler, pool)
        self._reporter = Reporter(
            scheduler,
            pool,
            self._decode_side,
            self._prefill_side,
            receivers,
            senders,
            self._idle_check,
            self._offload,
        )
        self._handlers = self._make_handlers()

    def _make_handlers(self) -> dict[type, Callable[[Any], None]]:
        """What is done about each kind of message and event."""
        return {
            AddRequest: self._add_request,
            AbortRequest: lambda m: self._abort(m.request_id),
            AddPrefill: self._add_prefill,
            PrefillAnnounced: self._decode_side.announced,
            PrefillAnswered: self._decode_side.answered,
            PrefillLost: self._decode_side.lost,
            PrefillGranted: self._prefill_side.granted,
            PrefillDeclined: self._prefill_side.declined,
            PrefillRoom: self._prefill_side.room,
            PrefillRenewed: self._prefill_side.renewed,
            PrefillEnded: self._prefill_side.ended,
            TakeSnapshot: self._take_snapshot,
            ResetPrefixCache: self._reset_prefix_cache,
            Shutdown: self._shutdown,
            RunAdmitted: self._decode_side.runs_admitted,
            RunsAdmitted: self._decode_side.runs_admitted,
            SessionComplete: self._decode_side.complete,
            ReceiveFailed: self._decode_side.receive_failed,
            WriterLeft: self._writer_left,
            BlocksAcknowledged: lambda _: None,  # counted by the mover; blocks go with a session
            SendFailed: self._prefill_side.send_failed,
            SessionDrained: self._prefill_side.drained,
            **self._offload.handlers,
        }

    def run(self) -> None:
        """Serve until Shutdown has been heard and its time to drain is over."""
        wait_s = 0.0
        while True:
            wait_s = 0.0 if self.turn(wait_s) else self._offload.loads.next_due_s(_IDLE_WAIT_S)
            if self._stop_at_ms is not None and self._may_stop():
                self._send(EngineStopped())
                return

    def turn(self, wait_s: float = 0.0) -> bool:
        """One look into the inbox and at most one step; whether another turn may find more to do at once.

        wait_s: how long to wait for the inbox.
        """
        for item in self._inbox.drain(wait_s):
            self.handle(item)
        self._expire()
        if self._outbox.has_outputs:
            self._tell()  # a first token from elsewhere does not wait for our own step
        self._storage.note_used(self._pool.num_ever_used, is_idle=self._is_idle)
        stepped = self._step()
        self._decode_side.offer_room()
        if self._is_idle:
            self._idle_check.look()
        else:
            self._idle_check.note_work()
        self._tell()
        return stepped

    def handle(self, item: InboxItem) -> None:
        """Act on one message or event."""
        self._handlers[type(item)](item)

    def close(self) -> None:
        """Stop the movers and let go of the tiers and the pool."""
        self._receivers.close()
        self._senders.close()
        self._offload.close()
        self._storage.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when pool, scheduler and sessions contradict each other."""
        self._scheduler.check_integrity(self._offload.held_blocks())
        self._decode_side.check_integrity(self._offload.loads.num_permits)
        self._prefill_side.check_integrity()
        check_writers(self._pool.life, map(BlockId, range(len(self._pool.life))))

    # ---- requests

    def _add_request(self, message: AddRequest) -> None:
        request = message.request
        timeline = self._outbox.open(request.id, request.sampling.n)
        try:
            if self._stop_at_ms is not None:
                raise WorkerLostError("the worker is shutting down")
            sequences = start_sequences(request)
            if request.deadline_ms is not None:
                due_ms = monotonic_ms() + request.deadline_ms
                heapq.heappush(self._deadlines, (due_ms, request.id))
            self._start(sequences, message.prefill_candidates, timeline)
            for sequence in sequences:
                self._offload.begin(sequence)
        except ServeError as error:
            self._scheduler.abort(request.id)  # choices that were taken before one was refused
            self._outbox.fail(request.id, error)

    def _start(self, sequences: list[Sequence], candidates: list[str], timeline: Timeline) -> None:
        first = sequences[0]
        if candidates and len(sequences) == 1 and not first.num_output_tokens:
            self._decode_side.start(first, candidates, timeline)
            return
        for sequence in sequences:
            if (end := self._scheduler.add(sequence)) is not None:
                self._outbox.add(end)

    def _add_prefill(self, message: AddPrefill) -> None:
        key = (message.session_id, message.attempt)
        try:
            if self._stop_at_ms is not None:
                raise WorkerLostError("the worker is shutting down")
            sequence = start_sequences(message.request)[0]
            self._prefill_side.add(message, sequence)
            self._offload.begin(sequence)
        except ServeError as error:
            self._send(RefusePrefill(*key, type(error).__name__, error.message))

    def _abort(self, request_id: RequestId) -> None:
        """Frees at once; unknown and finished requests are ignored."""
        self._decode_side.abort(request_id)
        self._scheduler.abort(request_id)
        self._outbox.abort(request_id)

    def _expire(self) -> None:
        now = monotonic_ms()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if self._outbox.is_open(request_id):
                self._outbox.expire(request_id)
                self._abort(request_id)
        self._decode_side.expire()
        self._prefill_side.expire()

    # ---- one step

    def _step(self) -> bool:
        self._offload.before_step()
        output = self._scheduler.schedule()
        # Before anybody is given blocks: one that is copied from may be free.
        self._runner.copy_blocks(output.copies)
        self._prefill_side.announce_next()
        if not output.items:
            self._offload.after_step()
            return bool(output.preempted)  # whoever gave way may be what the next plan runs
        for item in output.items:
            self._outbox.mark_scheduled(item.sequence.request.id)
        started_ms = monotonic_ms()
        logits = self._forward(output)
        rows = build_rows(output.items, self._eos_token_ids)
        sampled = self._sampler.sample(logits, rows) if rows else []
        self._deliver(self._scheduler.update(output, sampled))
        seconds = (monotonic_ms() - started_ms) / 1e3
        self._offload.after_step(output.num_batched_tokens, len(sampled), seconds)
        return True

    def _forward(self, output: SchedulerOutput) -> Any:
        items = [
            BatchItem(
                item.sequence.token_ids[item.start : item.start + item.num_tokens],
                item.start,
                item.sequence.block_table.ids(0),
                item.num_samples > 0,
            )
            for item in output.items
        ]
        batch = self._batches.build(items)
        listener = self._prefill_side.layers_done if self._prefill_side.num_sessions else None
        if listener is None:
            return self._runner.forward(batch, None)
        logits = self._runner.forward(batch, lambda first, count: listener(output, first, count))
        self._prefill_side.step_computed()
        return logits

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        """Tokens of sessions go to their decode workers, all others to the client."""
        sessions: dict[int, tuple[Sequence, list[SequenceUpdate]]] = {}
        for update in updates:
            if update.sequence.is_session:
                entry = sessions.setdefault(id(update.sequence), (update.sequence, []))
                entry[1].append(update)
            else:
                self._outbox.add(update)
        for sequence, its_updates in sessions.values():
            self._prefill_side.first_tokens(sequence, its_updates)

    def _relay(self, updates: list[SequenceUpdate]) -> None:
        """First tokens that another worker computed: on their way with the next StepDone."""
        for update in updates:
            self._outbox.add(update)

    # ---- telling

    def _tell(self) -> None:
        events = [*self._pool.take_events(), *self._offload.take_events()]
        report = self._reporter.report(self._outbox.take(), events)
        if report is not None:
            self._send(report)

    def _take_snapshot(self, message: TakeSnapshot) -> None:
        self._tell()
        number = self._reporter.last_event_number
        self._send(SnapshotTaken(message.query_id, number, self._reporter.published()))

    def _reset_prefix_cache(self, message: ResetPrefixCache) -> None:
        self._offload.reset()

    def _writer_left(self, event: WriterLeft) -> None:
        self._pool.settle(event.block)

    def _shutdown(self, message: Shutdown) -> None:
        self._stop_at_ms = monotonic_ms() + message.drain_ms

    @property
    def _is_idle(self) -> bool:
        """Whether no request is owed an end and no session one either, and no tier is at work."""
        return not (
            self._outbox.num_open or self._prefill_side.num_sessions or self._offload.is_busy
        )

    def _may_stop(self) -> bool:
        assert self._stop_at_ms is not None
        return self._is_idle or monotonic_ms() >= self._stop_at_ms
