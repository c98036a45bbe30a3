"""D's side of split serving: sequences whose prompt KV another worker sends.

    add -> pin_prefix + reserve (one act, at the grant) -> [first tokens] -> admit_with_kv
                        \\-> give_up_blocks -> pin_prefix + reserve for the next attempt
                         \\-> return_to_local

While it arrives, a sequence's table holds the pinned blocks, then the reserved ones, by position; copies of a partly
filled tail that n > 1 will need are reserved as spares. Movers write reserved blocks under a permit which is the
caller's business: it is revoked before any method here gives blocks back or admits.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from core.ids import BlockId
from engine.kvcache.manager import KVManager
from engine.sampler.rows import SampledToken
from engine.scheduler.admission import check_blocks, check_length, check_token_ids
from engine.scheduler.output import SequenceUpdate, make_updates
from engine.scheduler.roster import Roster
from engine.sequence import Sequence, SequenceStatus


class Arrivals:
    """The arriving sequences of one scheduler; see the module and `Scheduler` for each verb."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._kv: KVManager = roster.kv

    def add(self, sequence: Sequence) -> None:
        """Register as WAITING_FOR_KV."""
        config = self._roster.config
        check_token_ids(sequence, config.vocab_size)
        check_length(sequence, config.max_model_len, self._kv.capacity_tokens)
        sequence.num_arriving_tokens = sequence.num_tokens
        check_blocks(self.blocks_for_prompt(sequence), self._kv.pool.num_usable)
        self._roster.register(sequence)
        sequence.status = SequenceStatus.WAITING_FOR_KV
        self._roster.arriving.add(sequence)

    def blocks_for_prompt(self, sequence: Sequence) -> int:
        """Blocks an arriving sequence must hold, tail copies included."""
        num_tokens = sequence.num_arriving_tokens
        return self._kv.num_blocks_for(num_tokens) + self._num_tail_copies(sequence)

    def can_reserve(self, sequence: Sequence) -> bool:
        """Whether pin_prefix and reserve would succeed now."""
        copies = self._num_tail_copies(sequence) // self._kv.num_groups
        num_tokens = sequence.num_arriving_tokens + copies * self._kv.block_size
        return self._kv.fits(sequence, num_tokens)

    def pin_prefix(self, sequence: Sequence, max_tokens: int) -> int:
        """Hold what is cached; tokens that the table covers then."""
        self._check_arriving(sequence)
        sequence.num_cached_tokens = self._kv.pin_prefix(sequence, max_tokens)
        return sequence.num_cached_tokens

    def reserve(self, sequence: Sequence) -> bool:
        """Reserve all that is lacking, or nothing."""
        self._check_arriving(sequence)
        table = sequence.block_table
        copies_lacking = self._num_tail_copies(sequence) - len(table.spares)
        lacking = self.blocks_for_prompt(sequence) - table.num_held_blocks
        if lacking > self._kv.pool.num_free:
            return False
        spares = table.take_spares()  # they stay tail copies; the table is extended from the pool
        extended = self._kv.extend(sequence, sequence.num_arriving_tokens)
        table.spares = spares
        return extended and self._kv.add_spares(sequence, copies_lacking)

    def give_up_blocks(self, sequence: Sequence, keep_first: int) -> None:
        """Release all but the first blocks; commit those."""
        self._check_arriving(sequence)
        keep_first = min(keep_first, len(sequence.block_table))
        if keep_first:
            self._kv.accept_received(sequence, keep_first * self._kv.block_size)
        self._kv.release(sequence, keep_first)

    def accept_first_tokens(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        """Take the first token of each choice while KV still arrives; a repeated answer changes nothing."""
        self._check_arriving(sequence)
        if sequence.num_tokens > sequence.num_arriving_tokens:
            return []
        assert len(tokens) == sequence.num_choices, (
            f"{len(tokens)} tokens, n {sequence.num_choices}"
        )
        choices = self._roster.start_choices(sequence, tokens)
        updates = make_updates(choices, tokens)
        self._roster.counters.generation_tokens += len(tokens)
        sequence.forks = choices[1:]
        for fork in sequence.forks:
            self._roster.end_if_stopped(fork)
        if all(choice.finish_reason for choice in choices):
            self._roster.end_if_stopped(sequence)
        return updates

    def admit_with_kv(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """All KV is here: commit, fork, READY."""
        self._check_arriving(sequence)
        assert num_computed_tokens == sequence.num_arriving_tokens, "the prompt's KV is not whole"
        assert sequence.num_tokens > num_computed_tokens, "the first tokens are not known yet"
        self._count(sequence)
        self._roster.arriving.remove(sequence)
        self._kv.accept_received(sequence, num_computed_tokens)
        spares = sequence.block_table.take_spares()
        live = self._take_live_choices(sequence)
        for choice in live:
            if choice is not sequence:
                self._kv.share(sequence, choice)
            self._roster.make_ready(choice)
        self._hand_out(spares, live)
        self._roster.end_if_stopped(sequence)

    def return_to_local(self, sequence: Sequence, num_verified_blocks: int) -> None:
        """Give up remote KV; wait for local prefill."""
        self.give_up_blocks(sequence, num_verified_blocks)
        self._kv.release(sequence)
        self._roster.arriving.remove(sequence)
        for choice in self._take_live_choices(sequence):
            choice.num_arriving_tokens = 0
            self._roster.wait(choice)
        self._roster.end_if_stopped(sequence)

    @property
    def num_undecoded_blocks(self) -> int:
        """Distinct blocks held by sequences that do not decode yet."""
        waiting = (*self._roster.arriving, *self._roster.ready)
        tables = [sequence.block_table for sequence in waiting]
        return len(
            {block for table in tables for ids in (*table.groups, table.spares) for block in ids}
        )

    def _check_arriving(self, sequence: Sequence) -> None:
        assert sequence in self._roster.arriving, (
            f"the sequence is {sequence.status.name}, not arriving"
        )

    def _count(self, sequence: Sequence) -> None:
        """Note where a prompt's KV came from; num_computed_tokens still says how much was pinned."""
        counters, num_prompt = self._roster.counters, sequence.num_prompt_tokens
        num_pinned = min(sequence.num_computed_tokens, num_prompt)
        counters.prompt_tokens += num_prompt
        counters.cached_prompt_tokens += num_pinned
        counters.received_prompt_tokens += num_prompt - num_pinned

    def _num_tail_copies(self, sequence: Sequence) -> int:
        """Blocks for a tail of its own for each choice but one; a full tail is never written again."""
        if sequence.num_arriving_tokens % self._kv.block_size == 0:
            return 0
        return (sequence.num_choices - 1 + len(sequence.forks)) * self._kv.num_groups

    def _take_live_choices(self, sequence: Sequence) -> list[Sequence]:
        choices = [sequence, *sequence.forks]
        sequence.forks = []
        return [choice for choice in choices if not choice.finish_reason]

    def _hand_out(self, spares: list[BlockId], choices: list[Sequence]) -> None:
        """A tail copy for each choice but the last, which may write the original; the rest go back."""
        for choice in choices[:-1]:
            choice.block_table.spares = spares[: self._kv.num_groups]
            del spares[: self._kv.num_groups]
        self._kv.pool.release(spares)
