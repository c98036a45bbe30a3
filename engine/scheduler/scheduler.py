"""Decides each step: how many tokens of which sequence, under one token budget.

Owns every sequence of one engine and, through their tables, every block reference. There are no phases: a prompt, a
chunk of one, a decode step, a sequence whose KV came from elsewhere are all "tokens [start, end) of this sequence".
Order within a step:

    1. running sequences that are one token from sampling (a long prompt never holds up a cadence)
    2. running sequences in the middle of a prompt, as far as the budget goes
    3. unless somebody was preempted: READY sequences (their KV is here), then the waiting ones, in policy order

A local sequence is admitted when its whole prompt and one token more fit; it takes blocks for the prompt at once, so
it can finish its prefill whatever comes. The head of the waiting is never overtaken by one that needs fewer blocks,
except by sessions, which hold theirs already. When a running sequence needs a block and none is free, the last in
policy order gives all of its own back and waits to recompute. Sessions never need another block and never give way.

Engine thread only; calls alternate: schedule, (the step runs), update. Other methods are called in between, while no
step runs. Never touches tensors or token values beyond the stop rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from core.ids import BlockId, RequestId
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.manager import KVManager
from engine.sampler.rows import SampledToken
from engine.scheduler.admission import check_blocks, check_length, check_token_ids
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.counters import SchedulerCounters
from engine.scheduler.output import ScheduledItem, SchedulerOutput, SequenceUpdate
from engine.scheduler.policy import ORDERS, PolicyQueue
from engine.scheduler.stopping import ABORT, check_stop
from engine.sequence import Gate, Sequence, SequenceStatus

_QUEUED = (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)


class Scheduler:
    """See the module. `counters` are totals since construction; gauges are properties."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, num_groups: int = 1) -> None:
        self.config = config
        self.counters = SchedulerCounters()
        self.kv = KVManager(pool, config.block_size, num_groups, config.hash_root)
        self.max_length = min(config.max_model_len, self.kv.capacity_tokens)
        order = ORDERS[config.policy]
        self._waiting = PolicyQueue(order)
        self._ready = PolicyQueue(order)
        self._running = PolicyQueue(order)
        self._arriving: set[Sequence] = set()
        self._sessions: set[Sequence] = set()
        self._by_request: dict[RequestId, list[Sequence]] = {}
        self._num_arrivals = 0

    # ---- local requests

    def add(self, sequence: Sequence) -> SequenceUpdate | None:
        """Queue for local prefill; ContextTooLong or InvalidRequest when it can never run.

        Returns the end of a migrated run whose tokens already meet its stop rule, else None.
        """
        check_token_ids(sequence, self.config.vocab_size)
        reason, stop_token_id = self._check_stop(sequence)
        if reason:
            self._mark_finished(sequence, reason, stop_token_id)
            return SequenceUpdate(sequence, sequence.choice, [], reason, stop_token_id)
        check_length(sequence, self.config.max_model_len, self.kv.capacity_tokens)
        self._register(sequence)
        self._waiting.add(sequence)
        return None

    def abort(self, request_id: RequestId) -> list[Sequence]:
        """End every choice of a request that this engine owns (sessions are ended by `release`).

        A permit to write into its blocks has been revoked by the caller.
        """
        ended = list(self._by_request.get(request_id, ()))
        for sequence in ended:
            self._end(sequence, ABORT, None)
        return ended

    # ---- a step

    def schedule(self) -> SchedulerOutput:
        """The next step; no items when nothing can run now (then wait for a message)."""
        output = SchedulerOutput()
        chunks: list[Sequence] = []
        for sequence in self._running:
            if sequence.num_remaining_tokens > 1:
                chunks.append(sequence)
            elif sequence.status is SequenceStatus.RUNNING and self._has_place(output):
                self._make_writable(sequence, output)
        for sequence in chunks:
            if sequence.status is SequenceStatus.RUNNING and self._has_place(output):
                self._make_writable(sequence, output)
        if not output.preempted:
            self._admit_ready(output)
        if not output.preempted:
            self._admit_waiting(output)
        self.counters.steps += bool(output.items)
        return output

    def update(
        self, output: SchedulerOutput, sampled: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        """Take in what a step computed and sampled.

        sampled: flat, by item and then by choice, as `engine.sampler.build.build_rows` asks for them.
        """
        updates: list[SequenceUpdate] = []
        cursor = 0
        for sequence, start, num_tokens, num_samples in output.items:
            tokens = sampled[cursor : cursor + num_samples]
            cursor += num_samples
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # ended since the step was planned
            end = start + num_tokens
            if end // self.config.block_size > start // self.config.block_size:
                self.kv.commit_full(sequence, start, end)
            if start < sequence.num_prompt_tokens:
                computed = min(end, sequence.num_prompt_tokens) - start
                self.counters.computed_prompt_tokens += computed
            if tokens:
                updates += self._take_tokens(sequence, tokens)
        assert cursor == len(sampled), f"{len(sampled)} tokens sampled, {cursor} asked for"
        return updates

    @property
    def has_work(self) -> bool:
        """Whether schedule() may find something to run: arriving and gated sequences do not count."""
        if len(self._running) or len(self._ready):
            return True
        return any(sequence.gate is Gate.OPEN for sequence in self._waiting)

    # ---- D: KV that another worker sends

    def add_arriving(self, sequence: Sequence) -> None:
        """Register as WAITING_FOR_KV, holding nothing.

        Refuses what `add` refuses, and with NoCapacity what needs more blocks at once than the pool has.
        """
        check_token_ids(sequence, self.config.vocab_size)
        check_length(sequence, self.config.max_model_len, self.kv.capacity_tokens)
        sequence.num_arriving_tokens = sequence.num_tokens
        check_blocks(self.blocks_for_prompt(sequence), self.kv.pool.num_usable)
        self._register(sequence)
        sequence.status = SequenceStatus.WAITING_FOR_KV
        self._arriving.add(sequence)

    def blocks_for_prompt(self, sequence: Sequence) -> int:
        """Blocks an arriving sequence must hold: its prompt's over all groups, and n - 1 copies of a partial tail."""
        num_tokens = sequence.num_arriving_tokens
        return self.kv.num_blocks_for(num_tokens) + self._num_tail_copies(sequence)

    def count_cached_tokens(self, sequence: Sequence) -> int:
        """Leading tokens of a sequence that are cached now; holds nothing, so it is a hint."""
        return self.kv.count_cached_tokens(sequence)

    def pin_prefix(self, sequence: Sequence, max_tokens: int) -> int:
        """Match and hold what is cached of an arriving sequence; how many leading tokens its table covers then.

        May be called again for another attempt: what the table holds is kept, a longer match extends it.
        """
        assert sequence in self._arriving, "only an arriving sequence is pinned"
        sequence.num_cached_tokens = self.kv.pin_prefix(sequence, max_tokens)
        return sequence.num_cached_tokens

    def reserve(self, sequence: Sequence) -> bool:
        """Reserve all that `blocks_for_prompt` still lacks, or nothing.

        The prompt's blocks stand in the table, RESERVED, for the attempt's permit; the tail copies are spares.
        """
        table = sequence.block_table
        copies_lacking = self._num_tail_copies(sequence) - len(table.spares)
        lacking = self.blocks_for_prompt(sequence) - table.num_held_blocks
        if lacking > self.kv.pool.num_free:
            return False
        spares = table.take_spares()  # they stay tail copies; the table is extended from the pool
        extended = self.kv.extend(sequence, sequence.num_arriving_tokens)
        table.spares = spares
        return extended and self.kv.add_spares(sequence, copies_lacking)

    def give_up_blocks(self, sequence: Sequence, keep_first: int = 0) -> None:
        """Release the spares and every position from `keep_first` on; commit the first `keep_first`.

        Those are received whole and verified. The attempt's permit has been revoked by the caller.
        """
        keep_first = min(keep_first, len(sequence.block_table))
        if keep_first:
            self.kv.accept_received(sequence, keep_first * self.config.block_size)
        self.kv.release(sequence, keep_first)

    def accept_first_tokens(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        """The first token of each choice, known before the KV is whole. A repeated answer changes nothing.

        Choices that it ends are finished at once, the others go on when their KV is here. When every choice has
        ended, the sequence is FINISHED and holds nothing: end its session.
        """
        assert sequence in self._arriving, (
            "only an arriving sequence gets first tokens from elsewhere"
        )
        if sequence.num_tokens > sequence.num_arriving_tokens:
            return []
        assert len(tokens) == sequence.num_choices, (
            f"{len(tokens)} tokens, n {sequence.num_choices}"
        )
        choices = self._start_forks(sequence, tokens)
        sequence.forks = choices[1:]
        updates = []
        for choice, token in zip(choices, tokens, strict=True):
            choice.finish_reason, choice.stop_token_id = self._check_stop(choice)
            if choice.finish_reason and choice is not sequence:
                self._end(choice, choice.finish_reason, choice.stop_token_id)
            updates.append(_update(choice, [token]))
        if all(choice.finish_reason for choice in choices):
            self._end(sequence, sequence.finish_reason, sequence.stop_token_id)
        return updates

    def admit_with_kv(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The KV of tokens [0, num_computed_tokens) is whole and verified: all live choices are READY.

        Comes after `accept_first_tokens`; the attempt's permit has been revoked by the caller.
        """
        assert sequence in self._arriving, "only an arriving sequence is admitted with KV"
        assert num_computed_tokens == sequence.num_arriving_tokens, "the prompt's KV is not whole"
        assert sequence.num_tokens > num_computed_tokens, "the first tokens are not known yet"
        self._arriving.remove(sequence)
        pinned = sequence.num_computed_tokens
        self.counters.received_prompt_tokens += num_computed_tokens - pinned
        self.counters.prompt_tokens += num_computed_tokens
        self.kv.accept_received(sequence, num_computed_tokens)
        spares = sequence.block_table.take_spares()
        live = self._live_choices(sequence)
        for choice in live:
            if choice is not sequence:
                self.kv.share(sequence, choice)
            choice.status = SequenceStatus.READY
            self._ready.add(choice)
        self._hand_out_spares(live, spares)
        if sequence.finish_reason:
            self._end(sequence, sequence.finish_reason, sequence.stop_token_id)

    def return_to_local(self, sequence: Sequence, num_verified_blocks: int = 0) -> None:
        """Give up remote KV: every live choice waits for local prefill, with the tokens it has, holding nothing.

        The first `num_verified_blocks` blocks were received whole and verified; they stay findable. The permit has
        been revoked by the caller.
        """
        assert sequence in self._arriving, "only an arriving sequence returns to local prefill"
        self.give_up_blocks(sequence, num_verified_blocks)
        self.kv.release(sequence)
        self._arriving.remove(sequence)
        for choice in self._live_choices(sequence):
            choice.status = SequenceStatus.WAITING
            self._waiting.add(choice)
        if sequence.finish_reason:
            self._end(sequence, sequence.finish_reason, sequence.stop_token_id)

    @property
    def num_undecoded_blocks(self) -> int:
        """Blocks held by sequences that are not in the decode batch yet: what the cap on arriving KV covers."""
        tables = [sequence.block_table for sequence in (*self._arriving, *self._ready)]
        held = {block for table in tables for ids in (*table.groups, table.spares) for block in ids}
        return len(held)

    # ---- P: prompts computed for another worker

    def add_session(self, sequence: Sequence) -> None:
        """Queue a prompt for another worker, its gate CLOSED; refuses what `add` refuses."""
        check_token_ids(sequence, self.config.vocab_size)
        check_length(sequence, self.config.max_model_len, self.kv.capacity_tokens + 1)
        self._number(sequence)
        sequence.is_session, sequence.gate = True, Gate.CLOSED
        self._sessions.add(sequence)
        self._waiting.add(sequence)

    def sessions_due(self, steps_ahead: int = 1) -> list[Sequence]:
        """CLOSED sessions without blocks whose turn comes within the next steps, in order.

        Call after `schedule`, while the step runs: `take_blocks` of each, until one fails, and announce it.
        """
        budget = self.config.max_num_batched_tokens * steps_ahead
        tokens_ahead = sum(sequence.num_remaining_tokens for sequence in self._running)
        due: list[Sequence] = []
        for sequence in self._waiting:
            if tokens_ahead >= budget:
                break
            if sequence.gate is Gate.PARKED:
                continue
            if not sequence.is_session and not self._fits(sequence):
                break
            if sequence.gate is Gate.CLOSED and not len(sequence.block_table):
                due.append(sequence)
            tokens_ahead += sequence.num_remaining_tokens
        return due

    def take_blocks(self, sequence: Sequence) -> bool:
        """Blocks for a session's whole prompt, cached ones first; all or none. Sets num_cached_tokens."""
        assert sequence in self._sessions, "only a session takes blocks ahead of its turn"
        if len(sequence.block_table):
            return True
        if not self.kv.take_all(sequence, sequence.num_tokens):
            return False
        self._count_admission(sequence)
        return True

    def drop_blocks(self, sequence: Sequence) -> None:
        """The other side has no room: give the blocks back and be passed over until `unpark`."""
        assert sequence.gate is Gate.CLOSED, "only an announced session is declined"
        sequence.gate = Gate.PARKED
        self.kv.release(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """The other side has room again: the session is due again, at its old place in the queue."""
        if sequence.gate is Gate.PARKED:
            sequence.gate = Gate.CLOSED

    def open_gate(self, sequence: Sequence) -> None:
        """The other side granted: the session, which holds its blocks, runs at its turn."""
        assert len(sequence.block_table), "a session without blocks cannot be granted"
        sequence.gate = Gate.OPEN

    def halt(self, sequence: Sequence) -> None:
        """A session runs no further; it keeps its blocks until `release`, since somebody may still read them."""
        if sequence in self._sessions and not sequence.is_finished:
            self._detach(sequence)
            self._mark_finished(sequence, ABORT, None)

    def release(self, sequence: Sequence) -> None:
        """End a session wherever it stands and give its blocks back. Idempotent."""
        if sequence not in self._sessions:
            return
        self._sessions.remove(sequence)
        self._detach(sequence)
        self.kv.release(sequence)
        if not sequence.is_finished:
            self._mark_finished(sequence, ABORT, None)

    # ---- gauges and checks

    @property
    def num_running(self) -> int:
        """Sequences in the batch or READY to join it."""
        return len(self._running) + len(self._ready)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks, a grant or their turn."""
        return len(self._waiting)

    @property
    def num_arriving(self) -> int:
        """Sequences whose KV another worker sends."""
        return len(self._arriving)

    @property
    def num_sessions(self) -> int:
        """Prompts for other workers, from `add_session` to `release`."""
        return len(self._sessions)

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens still to compute here before their sequences decode."""
        running = sum(
            sequence.num_remaining_tokens
            for sequence in self._running
            if sequence.num_remaining_tokens > 1
        )
        return running + sum(sequence.num_remaining_tokens for sequence in self._waiting)

    def check_integrity(self) -> None:
        """Raise AssertionError with the reason when pool, tables and queues contradict each other."""
        tables: list[list[BlockId]] = []
        for sequence in self._all_sequences():
            table = sequence.block_table
            tables += [*table.groups, table.spares]
            if sequence.status in _QUEUED and not sequence.is_session:
                assert not table.num_held_blocks, "a waiting sequence holds blocks"
        self.kv.pool.check_integrity(tables)

    # ---- inside: planning

    def _has_place(self, output: SchedulerOutput) -> bool:
        return (
            output.num_batched_tokens < self.config.max_num_batched_tokens
            and len(output.items) < self.config.max_num_seqs
        )

    def _make_writable(self, sequence: Sequence, output: SchedulerOutput) -> None:
        """Plan the next tokens of a running sequence; the last in order give way until there are blocks."""
        num_tokens = self._next_tokens(sequence, output)
        while not self.kv.prepare_write(sequence, num_tokens, output.copies):
            # Decodes run in policy order and before all chunks, so whoever is last in order is not in this step yet.
            victim = next(s for s in reversed(self._running) if not s.is_session)
            self._preempt(victim, output)
            if victim is sequence:
                return
        self._plan(sequence, num_tokens, output)

    def _next_tokens(self, sequence: Sequence, output: SchedulerOutput) -> int:
        budget = self.config.max_num_batched_tokens - output.num_batched_tokens
        return min(sequence.num_remaining_tokens, budget)

    def _plan(self, sequence: Sequence, num_tokens: int, output: SchedulerOutput) -> None:
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = start + num_tokens
        is_last = not sequence.num_remaining_tokens
        num_samples = sequence.num_choices if is_last else 0
        output.items.append(ScheduledItem(sequence, start, num_tokens, num_samples))
        output.num_batched_tokens += num_tokens

    def _preempt(self, victim: Sequence, output: SchedulerOutput) -> None:
        self._detach(victim)
        self.kv.release(victim)
        victim.status = SequenceStatus.PREEMPTED
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        self._waiting.add(victim)
        output.preempted.append(victim)

    def _admit_ready(self, output: SchedulerOutput) -> None:
        for sequence in self._ready:
            if not self._has_place(output) or len(self._running) >= self.config.max_num_seqs:
                return
            if self.kv.prepare_write(sequence, 1, output.copies):
                self._ready.remove(sequence)
                self._join(sequence)
                self._plan(sequence, 1, output)
            elif not len(self._running):
                # Nobody runs, so nobody will free a block: the last of those that came gives way.
                self._preempt(next(reversed(self._ready)), output)
                return
            else:
                return

    def _admit_waiting(self, output: SchedulerOutput) -> None:
        places = self.config.max_num_seqs - sum(map(_num_places, self._running))
        blocked = False
        for sequence in self._waiting:
            wanted = _num_places(sequence)
            if not self._has_place(output) or (wanted > places and len(self._running)):
                return
            if not self._is_admissible(sequence, blocked):
                blocked = blocked or self._holds_up(sequence)
                continue
            places -= wanted
            self._waiting.remove(sequence)
            self._join(sequence)
            self._make_writable(sequence, output)

    def _is_admissible(self, sequence: Sequence, blocked: bool) -> bool:
        """Whether a waiting sequence has, or now got, blocks for its prompt. blocked: an earlier one lacks them."""
        if sequence.is_session:
            return sequence.gate is Gate.OPEN
        if blocked or not self.kv.take_all(sequence, sequence.num_tokens + 1):
            return False
        self._count_admission(sequence)
        return True

    def _holds_up(self, sequence: Sequence) -> bool:
        """Whether a sequence that cannot start keeps later ones from taking blocks: it is next and lacks them."""
        if not sequence.is_session:
            return True
        is_next = sequence.gate is Gate.CLOSED and not len(sequence.block_table)
        return is_next and not self._fits(sequence)

    def _fits(self, sequence: Sequence) -> bool:
        num_tokens = sequence.num_tokens + (not sequence.is_session)
        return self.kv.fits(sequence, num_tokens)

    def _join(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self._running.add(sequence)

    def _count_admission(self, sequence: Sequence) -> None:
        self.counters.prefix_cache_queries += sequence.num_tokens
        self.counters.prefix_cache_hits += sequence.num_computed_tokens
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = min(
                sequence.num_computed_tokens, sequence.num_prompt_tokens
            )
            self.counters.prompt_tokens += sequence.num_prompt_tokens

    # ---- inside: tokens

    def _take_tokens(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        self.counters.generation_tokens += len(tokens)
        if sequence.is_session:
            return self._end_session(sequence, tokens)
        choices = [sequence]
        if len(tokens) == 1:
            sequence.token_ids.append(tokens[0].token_id)
        else:
            choices = self._start_forks(sequence, tokens)
        updates = []
        for choice, token in zip(choices, tokens, strict=True):
            choice.finish_reason, choice.stop_token_id = self._check_stop(choice)
            updates.append(_update(choice, [token]))
        for choice in choices[1:]:
            if not choice.finish_reason:
                self.kv.share(sequence, choice)
                self._join(choice)
        for choice in choices:
            if choice.finish_reason:
                self._end(choice, choice.finish_reason, choice.stop_token_id)
        return updates

    def _start_forks(self, sequence: Sequence, tokens: SequenceOf[SampledToken]) -> list[Sequence]:
        """All choices, each with its first token; the forks hold no blocks yet."""
        forks = [
            sequence.fork(choice, token.token_id)
            for choice, token in enumerate(tokens[1:], sequence.choice + 1)
        ]
        sequence.token_ids.append(tokens[0].token_id)
        sequence.num_choices = 1
        self._by_request[sequence.request.id] += forks
        return [sequence, *forks]

    def _end_session(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        """The prompt is computed. Blocks stay held until `release`: movers still read them."""
        self._detach(sequence)
        updates = []
        for choice, token in enumerate(tokens, sequence.choice):
            end = self._check_stop(sequence.fork(choice, token.token_id))
            updates.append(SequenceUpdate(sequence, choice, [token], *end))
        sequence.status = SequenceStatus.FINISHED
        return updates

    def _check_stop(self, sequence: Sequence) -> tuple[str, int | None]:
        return check_stop(sequence, self.config.eos_token_ids, self.max_length)

    def _live_choices(self, sequence: Sequence) -> list[Sequence]:
        choices = [sequence, *sequence.forks]
        sequence.forks = []
        return [choice for choice in choices if not choice.finish_reason]

    # ---- inside: coming and going

    def _number(self, sequence: Sequence) -> None:
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.kv.attach(sequence)

    def _register(self, sequence: Sequence) -> None:
        self._number(sequence)
        self._by_request.setdefault(sequence.request.id, []).append(sequence)

    def _end(self, sequence: Sequence, reason: str, stop_token_id: int | None) -> None:
        """Finish a sequence of this engine's own and give its blocks back."""
        self._detach(sequence)
        self.kv.release(sequence)
        self._mark_finished(sequence, reason, stop_token_id)
        choices = self._by_request[sequence.request.id]
        choices.remove(sequence)
        if not choices:
            del self._by_request[sequence.request.id]

    def _mark_finished(self, sequence: Sequence, reason: str, stop_token_id: int | None) -> None:
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_token_id = reason, stop_token_id

    def _detach(self, sequence: Sequence) -> None:
        """Take a sequence out of whatever it is queued in."""
        if sequence.status in _QUEUED and sequence.arrival >= 0:
            self._waiting.remove(sequence)
        elif sequence.status is SequenceStatus.READY:
            self._ready.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        self._arriving.discard(sequence)

    def _num_tail_copies(self, sequence: Sequence) -> int:
        if sequence.num_arriving_tokens % self.config.block_size == 0:
            return 0
        return (sequence.num_choices - 1) * self.kv.num_groups

    def _hand_out_spares(self, choices: list[Sequence], spares: list[BlockId]) -> None:
        """One copy of the tail for each choice but the last, which may write the original."""
        for choice in choices[:-1]:
            choice.block_table.spares = spares[: self.kv.num_groups]
            del spares[: self.kv.num_groups]
        self.kv.pool.release(spares)

    def _all_sequences(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._ready
        yield from self._arriving
        yield from (sequence for sequence in self._waiting if not sequence.is_session)
        yield from (s for s in self._sessions if s.status is not SequenceStatus.RUNNING)


def _update(sequence: Sequence, tokens: list[SampledToken]) -> SequenceUpdate:
    return SequenceUpdate(
        sequence, sequence.choice, tokens, sequence.finish_reason, sequence.stop_token_id
    )


def _num_places(sequence: Sequence) -> int:
    """Places in the batch that a sequence takes: one for each choice it stands for."""
    return 1 if sequence.is_session else sequence.num_choices
