"""Decides each step, and owns every sequence of one engine and, through their tables, every block reference.

This is the whole surface; the parts behind it are the Roster (where each sequence stands), the StepPlanner (the rules
of a step), Arrivals (D: KV that another worker sends) and Sessions (P: prompts computed for another worker).

Engine thread only; calls alternate: `schedule`, the step runs, `update`. All other methods are called in between,
while no step runs. Never touches tensors, nor token values beyond the stop rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from core.ids import BlockId, RequestId
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.manager import KVManager
from engine.sampler.rows import SampledToken
from engine.scheduler.admission import check_length, check_token_ids
from engine.scheduler.arrivals import Arrivals
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.counters import SchedulerCounters
from engine.scheduler.output import SchedulerOutput, SequenceUpdate, make_updates
from engine.scheduler.planner import StepPlanner
from engine.scheduler.roster import Lender, Roster
from engine.scheduler.sessions import Sessions
from engine.scheduler.stopping import ABORT
from engine.sequence import Gate, Sequence, SequenceStatus


class Scheduler:
    """See the module. Gauges are properties; `counters` are totals since construction."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, num_groups: int = 1) -> None:
        self.config = config
        self.kv = KVManager(pool, config.block_size, num_groups, config.hash_root)
        self._roster = Roster(config, self.kv)
        self._arrivals = Arrivals(self._roster)
        self._sessions = Sessions(self._roster)

    # ---- requests of this engine's own

    def add(self, sequence: Sequence) -> SequenceUpdate | None:
        """Queue for local prefill; ContextTooLong or InvalidRequest when it can never run.

        Returns the end of a migrated run whose tokens already meet its stop rule, else None.
        """
        check_token_ids(sequence, self.config.vocab_size)
        reason, stop_token_id = self._roster.check_stop(sequence)
        if reason:
            sequence.status = SequenceStatus.FINISHED
            sequence.finish_reason, sequence.stop_token_id = reason, stop_token_id
            return SequenceUpdate(sequence, sequence.choice, [], reason, stop_token_id)
        check_length(sequence, self.config.max_model_len, self.kv.capacity_tokens)
        self._roster.register(sequence)
        self._roster.wait(sequence)
        return None

    def abort(self, request_id: RequestId) -> list[Sequence]:
        """End every choice of a request, wherever it stands; those that had not ended before are returned.

        Unknown ids are ignored. Sessions are ended by `release`. A permit to write into the request's blocks has been
        revoked by the caller.
        """
        ended: list[Sequence] = []
        for sequence in self._roster.owned_by(request_id):
            if sequence.finish_reason:
                # Its first token ended it; it was kept as the holder of KV for choices that went on.
                self._roster.end_if_stopped(sequence)
            else:
                self._roster.end(sequence, ABORT)
                ended.append(sequence)
        return ended

    def count_cached_tokens(self, sequence: Sequence) -> int:
        """Leading tokens whose KV is in the pool now. A hint: nothing is pinned."""
        return self.kv.count_cached_tokens(sequence)

    # ---- a step

    def schedule(self) -> SchedulerOutput:
        """The next step; no items when nothing can run now (then wait for a message)."""
        return StepPlanner(self._roster).plan()

    def update(
        self, output: SchedulerOutput, sampled: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        """Take in what a step computed and sampled: one update for each choice that got a token.

        sampled: flat, by item and then by choice, as `engine.sampler.build.build_rows` asks for them.
        """
        updates: list[SequenceUpdate] = []
        block_size = self.config.block_size
        cursor = 0
        for sequence, start, num_tokens, num_samples in output.items:
            tokens = sampled[cursor : cursor + num_samples]
            cursor += num_samples
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # ended since the step was planned
            end = start + num_tokens
            if end // block_size > start // block_size:
                self.kv.commit_full(sequence, start, end)
            if start < sequence.num_prompt_tokens:
                num_computed = min(end, sequence.num_prompt_tokens) - start
                self.counters.computed_prompt_tokens += num_computed
            if tokens:
                updates += self._take_tokens(sequence, tokens)
        assert cursor == len(sampled), f"{len(sampled)} tokens sampled, {cursor} asked for"
        return updates

    @property
    def has_work(self) -> bool:
        """Whether schedule() may find something to run: arriving and gated sequences do not count."""
        if len(self._roster.running) or len(self._roster.ready):
            return True
        return any(sequence.gate is Gate.OPEN for sequence in self._roster.waiting)

    # ---- D: KV that another worker sends

    def add_arriving(self, sequence: Sequence) -> None:
        """Register as WAITING_FOR_KV, holding nothing.

        Refuses what `add` refuses, and with NoCapacity what needs more blocks at once than the pool has.
        """
        self._arrivals.add(sequence)

    def blocks_for_prompt(self, sequence: Sequence) -> int:
        """Blocks an arriving sequence must hold: its prompt's over all groups, and n - 1 copies of a partial tail."""
        return self._arrivals.blocks_for_prompt(sequence)

    def can_reserve(self, sequence: Sequence) -> bool:
        """Whether an arriving sequence's whole prompt could be pinned and reserved now."""
        return self._arrivals.can_reserve(sequence)

    def pin_prefix(self, sequence: Sequence, max_tokens: int) -> int:
        """Match and hold what is cached of an arriving sequence; how many leading tokens its table covers then.

        May be called again for another attempt: what the table holds is kept, a longer match extends it.
        """
        return self._arrivals.pin_prefix(sequence, max_tokens)

    def reserve(self, sequence: Sequence) -> bool:
        """Reserve all that `blocks_for_prompt` still lacks, or nothing.

        The prompt's blocks stand in the table, RESERVED, for the attempt's permit; the tail copies are spares.
        """
        return self._arrivals.reserve(sequence)

    def give_up_blocks(self, sequence: Sequence, keep_first: int = 0) -> None:
        """Release the spares and every position from `keep_first` on; commit the first `keep_first`.

        Those are received whole and verified. The attempt's permit has been revoked by the caller. What is kept counts
        against the cap on arriving KV: a sequence that waits for its next attempt gives up the rest with a second
        call, so that nobody waits while holding; with prefix caching on the next pin finds them again.
        """
        self._arrivals.give_up_blocks(sequence, keep_first)

    def accept_first_tokens(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        """The first token of each choice, known before the KV is whole. A repeated answer changes nothing.

        Choices that it ends are finished at once, the others go on when their KV is here. When every choice has
        ended, the sequence is FINISHED and holds nothing: the caller has revoked its permit, or does so at once,
        before the next allocation.
        """
        return self._arrivals.accept_first_tokens(sequence, tokens)

    def admit_with_kv(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The KV of tokens [0, num_computed_tokens) is whole and verified: all live choices are READY.

        Comes after `accept_first_tokens`; the attempt's permit has been revoked by the caller.
        """
        self._arrivals.admit_with_kv(sequence, num_computed_tokens)

    def return_to_local(self, sequence: Sequence, num_verified_blocks: int = 0) -> None:
        """Give up remote KV: every live choice waits for local prefill, with the tokens it has, holding nothing.

        The first `num_verified_blocks` blocks were received whole and verified; they stay findable. The permit has
        been revoked by the caller.
        """
        self._arrivals.return_to_local(sequence, num_verified_blocks)

    @property
    def num_undecoded_blocks(self) -> int:
        """Blocks held by sequences that are not in the decode batch yet: what the cap on arriving KV covers."""
        return self._arrivals.num_undecoded_blocks

    # ---- P: prompts computed for another worker

    def add_session(self, sequence: Sequence) -> None:
        """Queue a prompt for another worker, its gate CLOSED; refuses what `add` refuses."""
        self._sessions.add(sequence)

    def sessions_due(self, steps_ahead: int = 1) -> list[Sequence]:
        """CLOSED sessions without blocks whose turn comes within the next `steps_ahead` calls of `schedule`, in order.

        `take_blocks` of each, until one fails, and announce it.
        """
        return self._sessions.due(steps_ahead)

    def take_blocks(self, sequence: Sequence) -> bool:
        """Blocks for a session's whole prompt, cached ones first; all or none. Sets num_cached_tokens."""
        return self._sessions.take_blocks(sequence)

    def drop_blocks(self, sequence: Sequence) -> None:
        """The other side has no room: give the blocks back and be passed over until `unpark`."""
        self._sessions.drop_blocks(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """The other side has room again: the session is due again, at its old place in the queue."""
        self._sessions.unpark(sequence)

    def open_gate(self, sequence: Sequence) -> None:
        """The other side granted: the session, which holds its blocks, runs at its turn."""
        self._sessions.open_gate(sequence)

    def halt(self, sequence: Sequence) -> None:
        """Stop computing a session; its blocks stay held, since movers may still read them, until `release`."""
        self._sessions.halt(sequence)

    def release(self, sequence: Sequence) -> None:
        """End a session wherever it stands and give its blocks back. Idempotent."""
        self._sessions.release(sequence)

    # ---- tiers: KV that comes back from below the pool

    def use_tiers(self, lender: Lender) -> None:
        """From now on no sequence of this engine's own starts before it has been looked up (`is_looked_up`).

        lender: gives way before anybody who runs does.
        """
        self._roster.lender = lender

    def queued(self) -> Iterator[Sequence]:
        """This engine's own sequences that wait or are held, in policy order."""
        return self._roster.in_order()

    def order_of(self, sequence: Sequence) -> tuple[int, ...]:
        """A sequence's place in policy order: the lower goes first."""
        return self._roster.waiting.key(sequence)

    def hold(self, sequence: Sequence) -> None:
        """A tier has KV of a waiting sequence without blocks: WAITING_FOR_KV, holding nothing, until `resume`."""
        self._roster.hold(sequence)

    def resume(self, sequence: Sequence) -> None:
        """What a tier gave is in the pool, or nothing more will come: wait at the old place again."""
        self._roster.resume(sequence)

    def is_held(self, sequence: Sequence) -> bool:
        """Whether `hold` is still in force: the sequence may have ended meanwhile."""
        return sequence in self._roster.loading

    # ---- gauges, counters, checks

    @property
    def max_length(self) -> int:
        """Tokens at which any sequence ends: the model's limit, or what an empty pool holds."""
        return self._roster.max_length

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since construction."""
        return self._roster.counters

    @property
    def num_running(self) -> int:
        """Sequences in the batch or READY to join it."""
        return len(self._roster.running) + len(self._roster.ready)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks, a grant or their turn."""
        return len(self._roster.waiting)

    @property
    def num_loading(self) -> int:
        """Waiting sequences whose KV is read from a tier."""
        return len(self._roster.loading)

    @property
    def num_arriving(self) -> int:
        """Sequences whose KV another worker sends."""
        return len(self._roster.arriving)

    @property
    def num_sessions(self) -> int:
        """Prompts for other workers, from `add_session` to `release`."""
        return len(self._roster.sessions)

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens still to compute here before their sequences decode, running chunks included."""
        running = [sequence.num_remaining_tokens for sequence in self._roster.running]
        waiting = [sequence.num_remaining_tokens for sequence in self._roster.waiting]
        return sum(remaining for remaining in running if remaining > 1) + sum(waiting)

    def check_integrity(self, held_elsewhere: Iterable[Iterable[BlockId]] = ()) -> None:
        """Raise AssertionError with the reason when pool, tables and queues contradict each other.

        held_elsewhere: blocks that others than sequences hold, for each holder.
        """
        self._roster.check_integrity(held_elsewhere)

    # ---- inside

    def _take_tokens(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        if sequence.is_session:
            return self._sessions.finish(sequence, tokens)
        self.counters.generation_tokens += len(tokens)
        choices = self._roster.start_choices(sequence, tokens)
        for choice in choices[1:]:
            self.kv.share(sequence, choice)
            self._roster.join(choice)
        updates = make_updates(choices, tokens)
        for choice in choices:
            self._roster.end_if_stopped(choice)
        return updates
