"""P's side of split serving: prompts computed for another worker.

    add (gate CLOSED) -> due -> take_blocks -> announced -> open_gate -> runs at its turn -> done -> release
                                     \\-> drop_blocks (PARKED) -> unpark -> due

A session holds blocks for its whole prompt from `take_blocks` on and never needs another, so it is never preempted.
When its first tokens are sampled it leaves the batch; its blocks stay held until `release`, since movers read them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.kvcache.manager import KVManager
from engine.sampler.rows import SampledToken
from engine.scheduler.admission import check_length, check_token_ids
from engine.scheduler.output import SequenceUpdate
from engine.scheduler.planner import count_admission
from engine.scheduler.roster import Roster
from engine.scheduler.stopping import ABORT
from engine.sequence import Gate, Sequence, SequenceStatus


class Sessions:
    """The sessions of one scheduler; see the module and `Scheduler` for each verb."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._kv: KVManager = roster.kv

    def add(self, sequence: Sequence) -> None:
        """Queue with a CLOSED gate."""
        config = self._roster.config
        check_token_ids(sequence, config.vocab_size)
        check_length(sequence, config.max_model_len, self._kv.capacity_tokens + 1)
        self._roster.number(sequence)
        sequence.is_session, sequence.gate = True, Gate.CLOSED
        self._roster.sessions.add(sequence)
        self._roster.wait(sequence)

    def due(self, steps_ahead: int) -> list[Sequence]:
        """CLOSED sessions without blocks whose turn is near, in order."""
        budget = self._roster.config.max_num_batched_tokens * steps_ahead
        tokens_ahead = sum(sequence.num_remaining_tokens for sequence in self._roster.running)
        due: list[Sequence] = []
        for sequence in self._roster.waiting:
            if tokens_ahead >= budget:
                break
            if sequence.gate is Gate.PARKED:
                continue
            if not sequence.is_session and not self._kv.fits(sequence, sequence.num_tokens + 1):
                break
            if sequence.gate is Gate.CLOSED and not len(sequence.block_table):
                due.append(sequence)
            tokens_ahead += sequence.num_remaining_tokens
        return due

    def take_blocks(self, sequence: Sequence) -> bool:
        """Blocks for the whole prompt, all or none."""
        self._check_session(sequence)
        if len(sequence.block_table):
            return True
        if not self._kv.take_all(sequence, sequence.num_tokens):
            return False
        count_admission(self._roster, sequence)
        return True

    def drop_blocks(self, sequence: Sequence) -> None:
        """Give the blocks back and PARK."""
        self._check_session(sequence)
        assert sequence.gate is Gate.CLOSED, "only an announced session is declined"
        sequence.gate = Gate.PARKED
        sequence.is_looked_up = False
        self._kv.release(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """PARKED -> CLOSED."""
        if sequence.gate is Gate.PARKED:
            sequence.gate = Gate.CLOSED

    def open_gate(self, sequence: Sequence) -> None:
        """CLOSED -> OPEN."""
        self._check_session(sequence)
        assert len(sequence.block_table), "a session without blocks cannot be granted"
        sequence.gate = Gate.OPEN

    def finish(self, sequence: Sequence, tokens: SequenceOf[SampledToken]) -> list[SequenceUpdate]:
        """The prompt is computed and its first tokens are sampled: out of the batch, blocks still held."""
        self._roster.detach(sequence)
        sequence.status = SequenceStatus.FINISHED
        updates = []
        for choice, token in enumerate(tokens, sequence.choice):
            end = self._roster.check_stop(sequence.fork(choice, token.token_id))
            updates.append(SequenceUpdate(sequence, choice, [token], *end))
        return updates

    def halt(self, sequence: Sequence) -> None:
        """Stop computing; the blocks stay held."""
        if sequence in self._roster.sessions and not sequence.is_finished:
            self._roster.detach(sequence)
            sequence.status = SequenceStatus.FINISHED
            sequence.finish_reason = ABORT

    def release(self, sequence: Sequence) -> None:
        """End wherever it stands, blocks back. Idempotent."""
        if sequence not in self._roster.sessions:
            return
        self.halt(sequence)
        self._roster.sessions.remove(sequence)
        self._kv.release(sequence)

    def _check_session(self, sequence: Sequence) -> None:
        assert sequence in self._roster.sessions, "the sequence is no session, or has been released"
