"""Plans one step: how many tokens of which sequence, under one token budget.

There are no phases: a prompt, a chunk of one, a decode step, a sequence whose KV came from elsewhere are all "tokens
[start, end) of this sequence". Order within a step:

    1. running sequences that are one token from sampling (a long prompt never holds up a cadence)
    2. running sequences in the middle of a prompt, in equal chunks, as far as the budget goes
    3. unless somebody was preempted: READY sequences, then the waiting ones, in policy order

A local sequence is admitted when its whole prompt and one token more fit; it takes blocks for the prompt at once, so
it can finish its prefill whatever comes. The head of the waiting is never overtaken by one that needs fewer blocks,
except by sessions, which hold theirs already. When a running sequence needs a block and none is free, the last in
policy order gives all of its own back and waits, to recompute or to load. Sessions never need another block and never
give way.
"""

from __future__ import annotations

from engine.kvcache.manager import KVManager
from engine.scheduler.output import ScheduledItem, SchedulerOutput
from engine.scheduler.roster import Roster
from engine.sequence import Gate, Sequence, SequenceStatus


class StepPlanner:
    """Makes one SchedulerOutput; built anew for each step."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._kv: KVManager = roster.kv
        self._max_tokens = roster.config.max_num_batched_tokens
        self._max_seqs = roster.config.max_num_seqs
        self._output = SchedulerOutput()

    def plan(self) -> SchedulerOutput:
        """The step; progress is advanced and blocks are taken at once."""
        self._plan_running()
        if not self._output.preempted:
            self._admit_ready()
        if not self._output.preempted:
            self._admit_waiting()
        self._roster.counters.steps += bool(self._output.items)
        return self._output

    # ---- running

    def _plan_running(self) -> None:
        chunks: list[Sequence] = []
        for sequence in self._roster.running:
            remaining = len(sequence.token_ids) - sequence.num_computed_tokens
            if remaining > 1:
                chunks.append(sequence)
            elif remaining == 1 and sequence.status is SequenceStatus.RUNNING and self._has_place():
                self._run(sequence)
        for sequence in chunks:
            if sequence.status is SequenceStatus.RUNNING and self._has_place():
                self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        """Plan the next tokens of a running sequence; the last in order give way until there are blocks."""
        num_tokens = self._num_next_tokens(sequence)
        while not self._prepare(sequence, num_tokens):
            # Decodes go first, in policy order, and chunks need no blocks: so the last in order is the one that
            # asks, or one that is not in this step yet.
            victim = next(s for s in reversed(self._roster.running) if not s.is_session)
            if victim is sequence and self._is_lent():
                return  # to wait for movers is shorter than to begin anew
            self._preempt(victim)
            if victim is sequence:
                return
        self._add_item(sequence, num_tokens)

    def _prepare(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the next tokens writable; loads for those who wait give way to whoever runs."""
        lender = self._roster.lender
        while not self._kv.prepare_write(sequence, num_tokens, self._output.copies):
            if lender is None or not lender.reclaim():
                return False
        return True

    def _is_lent(self) -> bool:
        """Whether movers hold blocks that come back by themselves."""
        return self._roster.lender is not None and self._roster.lender.is_lending

    def _preempt(self, victim: Sequence) -> None:
        self._roster.preempt(victim)
        self._output.preempted.append(victim)

    def _has_place(self) -> bool:
        output = self._output
        return output.num_batched_tokens < self._max_tokens and len(output.items) < self._max_seqs

    def _num_next_tokens(self, sequence: Sequence) -> int:
        """An equal share of what is left for each step that it needs: a short last chunk costs nearly a full one."""
        remaining = sequence.num_remaining_tokens
        num_steps = -(-remaining // self._max_tokens)
        share = -(-remaining // num_steps)
        return min(share, self._max_tokens - self._output.num_batched_tokens)

    def _add_item(self, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = start + num_tokens
        reaches_end = start + num_tokens == len(sequence.token_ids)
        num_samples = sequence.num_choices if reaches_end else 0
        self._output.items.append(ScheduledItem(sequence, start, num_tokens, num_samples))
        self._output.num_batched_tokens += num_tokens

    # ---- joining the batch

    def _admit_ready(self) -> None:
        running = self._roster.running
        for sequence in self._roster.ready:
            if not self._has_place() or len(running) >= self._max_seqs:
                return
            if not self._prepare(sequence, 1):
                if not len(running) and not self._is_lent():
                    # Nobody runs, so nobody will free a block: the last of those that came gives way.
                    self._preempt(next(reversed(self._roster.ready)))
                return
            self._roster.ready.remove(sequence)
            self._roster.join(sequence)
            self._add_item(sequence, 1)

    def _admit_waiting(self) -> None:
        running = self._roster.running
        places = self._max_seqs - sum(map(num_places, running))
        blocked = False
        for sequence in self._roster.waiting:
            wanted = num_places(sequence)
            if not self._has_place() or (wanted > places and len(running)):
                return
            if blocked and not self._roster.sessions:
                return
            if not self._may_start(sequence, blocked):
                blocked = blocked or holds_up_others(self._kv, sequence)
                continue
            places -= wanted
            self._roster.waiting.remove(sequence)
            self._roster.join(sequence)
            self._run(sequence)

    def _may_start(self, sequence: Sequence, blocked: bool) -> bool:
        """Whether a waiting sequence has, or now got, blocks for its prompt. blocked: an earlier one lacks them."""
        if sequence.is_session:
            return sequence.gate is Gate.OPEN
        if blocked or (self._roster.lender is not None and not sequence.is_looked_up):
            return False  # who has not been looked up yet lacks room even for that
        if not self._kv.take_all(sequence, sequence.num_tokens + 1):
            return False
        count_admission(self._roster, sequence)
        return True


def num_places(sequence: Sequence) -> int:
    """Places in the batch that a sequence takes: one for each choice it stands for."""
    return 1 if sequence.is_session else sequence.num_choices


def holds_up_others(kv: KVManager, sequence: Sequence) -> bool:
    """Whether a sequence that cannot start keeps later ones from taking blocks: it is next, and lacks them.

    A session that is parked, or holds its blocks and waits for its grant, holds up nobody.
    """
    if not sequence.is_session:
        return True
    is_next = sequence.gate is Gate.CLOSED and not len(sequence.block_table)
    return is_next and not kv.fits(sequence, sequence.num_tokens)


def count_admission(roster: Roster, sequence: Sequence) -> None:
    """Note what was found for a sequence that just got its blocks.

    Counters take every token. The request is told of whole blocks, as clients know it from vLLM.
    """
    num_found = sequence.num_computed_tokens
    roster.counters.prefix_cache_queries += sequence.num_tokens
    roster.counters.prefix_cache_hits += num_found
    if sequence.num_preemptions or sequence.num_arriving_tokens:
        return
    num_whole = num_found - num_found % roster.config.block_size
    sequence.num_cached_tokens = min(num_whole, sequence.num_prompt_tokens)
    roster.counters.prompt_tokens += sequence.num_prompt_tokens
    roster.counters.cached_prompt_tokens += min(num_found, sequence.num_prompt_tokens)
