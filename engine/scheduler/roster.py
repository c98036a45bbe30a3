"""Which sequences there are and where each stands.

    waiting    WAITING, PREEMPTED: hold no blocks, except sessions that took theirs ahead of their turn
    arriving   WAITING_FOR_KV: hold what is pinned and reserved for another worker's KV
    loading    WAITING_FOR_KV: hold nothing; their KV is read from a tier into the pool
    ready      READY: hold all KV of their prompt, wait for a place in the batch
    running    RUNNING
    sessions   prompts computed for another worker, in any state, from their start to their release

The one place where a sequence changes queue, begins, forks or ends. The scheduler's other parts say when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from heapq import merge
from typing import Protocol

from core.ids import BlockId, RequestId
from engine.kvcache.manager import KVManager
from engine.sampler.rows import SampledToken
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.counters import SchedulerCounters
from engine.scheduler.policy import ORDERS, PolicyQueue
from engine.scheduler.stopping import check_stop
from engine.sequence import WAITING_STATUSES, Sequence, SequenceStatus


class Lender(Protocol):
    """Who holds blocks for movers, beside the sequences."""

    def reclaim(self) -> bool:
        """Give up what can be given up at once, if anything; whether there was something."""
        ...

    @property
    def is_lending(self) -> bool:
        """Whether more will come back by itself, soon."""
        ...


class Roster:
    """Shared by the parts of one scheduler; see the module."""

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config = config
        self.kv = kv
        self.counters = SchedulerCounters()
        self.max_length = min(config.max_model_len, kv.capacity_tokens)
        order = ORDERS[config.policy]
        self.waiting = PolicyQueue(order)
        self.ready = PolicyQueue(order)
        self.running = PolicyQueue(order)
        self.arriving: set[Sequence] = set()
        self.loading = PolicyQueue(order)
        self.lender: Lender | None = None
        self.sessions: set[Sequence] = set()
        self._by_request: dict[RequestId, list[Sequence]] = {}
        self._num_arrivals = 0

    # ---- beginning

    def number(self, sequence: Sequence) -> None:
        """Give a new sequence its place in the order of arrival, and its hash chain."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.kv.attach(sequence)

    def register(self, sequence: Sequence) -> None:
        """Number a sequence whose request this engine owns to its last token."""
        self.number(sequence)
        self._by_request.setdefault(sequence.request.id, []).append(sequence)

    def start_choices(self, sequence: Sequence, tokens: SequenceOf[SampledToken]) -> list[Sequence]:
        """All choices of a sequence, each with its first token and its end if that token is one.

        The sequence itself is the first of them; the forks hold no blocks and stand in no queue yet.
        """
        choices = [sequence]
        if len(tokens) > 1:
            numbered = enumerate(tokens[1:], sequence.choice + 1)
            choices += [sequence.fork(choice, token.token_id) for choice, token in numbered]
            self._by_request[sequence.request.id] += choices[1:]
            sequence.num_choices = 1
        sequence.token_ids.append(tokens[0].token_id)
        for choice in choices:
            choice.finish_reason, choice.stop_token_id = self.check_stop(choice)
        return choices

    def check_stop(self, sequence: Sequence) -> tuple[str, int | None]:
        """(finish reason, stop token id) after a sequence's last token; empty while it goes on."""
        return check_stop(sequence, self.config.eos_token_ids, self.max_length)

    # ---- moving

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence that holds no blocks for local prefill."""
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Take a queued sequence, which holds no blocks, aside while a tier's KV comes into the pool."""
        self.detach(sequence)
        sequence.status = SequenceStatus.WAITING_FOR_KV
        self.loading.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Put it back to its old place: what came is found like all that is cached."""
        self.loading.remove(sequence)
        self.wait(sequence)

    def in_order(self) -> Iterator[Sequence]:
        """Waiting sequences of this engine's own and those that are loading, in policy order."""
        queued = merge(self.waiting, self.loading, key=self.waiting.key)
        return (sequence for sequence in queued if not sequence.is_session)

    def make_ready(self, sequence: Sequence) -> None:
        """Queue a sequence that holds all KV of its prompt for a place in the batch."""
        sequence.status = SequenceStatus.READY
        self.ready.add(sequence)

    def join(self, sequence: Sequence) -> None:
        """Put a sequence in the batch."""
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks from a RUNNING or READY sequence; it waits at its old place, to recompute or to load."""
        self.detach(sequence)
        self.kv.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        sequence.is_looked_up = False
        self.counters.preemptions += 1
        self.waiting.add(sequence)

    def detach(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue that its status names; it keeps its blocks."""
        if sequence.is_waiting:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.READY:
            self.ready.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.loading:
            self.loading.remove(sequence)
        self.arriving.discard(sequence)

    # ---- ending

    def end(self, sequence: Sequence, reason: str, stop_token_id: int | None = None) -> None:
        """Finish a registered sequence and give its blocks back."""
        self.detach(sequence)
        self.kv.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_token_id = reason, stop_token_id
        choices = self._by_request[sequence.request.id]
        choices.remove(sequence)
        if not choices:
            del self._by_request[sequence.request.id]

    def end_if_stopped(self, sequence: Sequence) -> None:
        """Finish a choice whose last token ended it."""
        if sequence.finish_reason:
            self.end(sequence, sequence.finish_reason, sequence.stop_token_id)

    def owned_by(self, request_id: RequestId) -> list[Sequence]:
        """The choices of a request that have not ended, sessions not among them."""
        return list(self._by_request.get(request_id, ()))

    # ---- looking

    def check_integrity(self, held_elsewhere: Iterable[Iterable[BlockId]] = ()) -> None:
        """Raise AssertionError with the reason when pool, tables and queues contradict each other.

        held_elsewhere: blocks that others than sequences hold, for each holder.
        """
        tables: list[Iterable[BlockId]] = list(held_elsewhere)
        for sequence in self._all_sequences():
            table = sequence.block_table
            tables += [*table.groups, table.spares]
            if sequence.is_waiting and not sequence.is_session:
                assert not table.num_held_blocks, "a waiting sequence holds blocks"
        for queue, statuses in (
            (self.waiting, WAITING_STATUSES),
            (self.ready, (SequenceStatus.READY,)),
            (self.running, (SequenceStatus.RUNNING,)),
            (self.arriving, (SequenceStatus.WAITING_FOR_KV,)),
            (self.loading, (SequenceStatus.WAITING_FOR_KV,)),
        ):
            for sequence in queue:
                assert sequence.status in statuses, f"{sequence.status.name} in a wrong queue"
        self.kv.pool.check_integrity(tables)

    def _all_sequences(self) -> Iterator[Sequence]:
        yield from self.sessions
        for queue in (self.waiting, self.ready, self.running, self.arriving, self.loading):
            yield from (sequence for sequence in queue if not sequence.is_session)
