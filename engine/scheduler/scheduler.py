"""Public surface of the scheduler; bodies follow."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from core.ids import BlockId, RequestId
from engine.kvcache.block_pool import BlockPool
from engine.sampler.rows import SampledToken
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.output import SchedulerOutput, SequenceUpdate
from engine.sequence import Sequence


class Scheduler:
    """Decides each step; owns every sequence of one engine and, through them, every block reference."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        raise NotImplementedError

    # ---- local requests

    def add(self, sequence: Sequence) -> SequenceUpdate | None:
        """Queue for local prefill. ContextTooLong / InvalidRequest when it can never run.

        Returns the end of a migrated run whose tokens already meet its stop rule; else None.
        """
        raise NotImplementedError

    def abort(self, request_id: RequestId) -> list[Sequence]:
        """End all choices of a request that are not sessions (waiting, arriving, ready, running)."""
        raise NotImplementedError

    def schedule(self) -> SchedulerOutput:
        """The next step; empty items when nothing can run."""
        raise NotImplementedError

    def update(
        self, output: SchedulerOutput, sampled: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        """Take in what a step sampled, flat, in the order of engine.sampler.build.build_rows."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether schedule() may have something to run (gated sessions and arriving sequences do not count)."""
        raise NotImplementedError

    # ---- D: KV that another worker sends

    def add_arriving(self, sequence: Sequence) -> None:
        """Register as WAITING_FOR_KV. NoCapacity when blocks_for_prompt exceeds an empty pool."""
        raise NotImplementedError

    def blocks_for_prompt(self, sequence: Sequence) -> int:
        """Blocks the sequence must hold to be admitted with KV: the prompt's, all groups, tail copies included."""
        raise NotImplementedError

    def pin_prefix(self, sequence: Sequence, max_tokens: int) -> int:
        """Match, acquire and put in the table what is cached; how many leading tokens the table then covers."""
        raise NotImplementedError

    def reserve(self, sequence: Sequence) -> bool:
        """Reserve what blocks_for_prompt still lacks: RESERVED blocks in the table, tail copies as spares; all or none."""
        raise NotImplementedError

    def give_up_blocks(self, sequence: Sequence, keep_first: int = 0) -> None:
        """Release positions from keep_first on (tail first) and the spares; commit what is kept.

        The caller has revoked the permit. The first keep_first blocks are whole and verified.
        """
        raise NotImplementedError

    def accept_first_tokens(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken]
    ) -> list[SequenceUpdate]:
        """P's first token of each choice. Choices it ends are finished here; the others wait for their KV.

        When every choice ended, the sequence is FINISHED and holds nothing.
        """
        raise NotImplementedError

    def admit_with_kv(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The prompt's KV is whole and verified, its permit revoked: commit full blocks, fork, and make READY."""
        raise NotImplementedError

    def return_to_local(self, sequence: Sequence, num_verified_blocks: int = 0) -> None:
        """Give up remote KV: all blocks are released (verified ones stay findable), every live choice waits locally."""
        raise NotImplementedError

    @property
    def num_undecoded_blocks(self) -> int:
        """Blocks held by sequences that are not yet in the decode batch: what the arriving cap covers."""
        raise NotImplementedError

    # ---- P: prompts computed for another worker

    def add_session(self, sequence: Sequence) -> None:
        """Queue a prompt for another worker, gate CLOSED."""
        raise NotImplementedError

    def sessions_due(self) -> list[Sequence]:
        """CLOSED sessions without blocks whose turn comes within the next step, in order: take_blocks, then announce."""
        raise NotImplementedError

    def take_blocks(self, sequence: Sequence) -> bool:
        """Blocks for the whole prompt, cached prefix included (num_cached_tokens is set); all or none."""
        raise NotImplementedError

    def drop_blocks(self, sequence: Sequence) -> None:
        """D has no room: give the blocks back and be passed over until unpark."""
        raise NotImplementedError

    def unpark(self, sequence: Sequence) -> None:
        """D reports room: the session is due again, at its old place in the queue."""
        raise NotImplementedError

    def open_gate(self, sequence: Sequence) -> None:
        """D granted: the session runs at its turn."""
        raise NotImplementedError

    def release(self, sequence: Sequence) -> None:
        """End a session wherever it stands and give its blocks back. Idempotent."""
        raise NotImplementedError

    # ---- gauges

    @property
    def num_running(self) -> int:
        """Sequences in the batch, READY ones included."""
        raise NotImplementedError

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks or for their turn, sessions included."""
        raise NotImplementedError

    @property
    def num_arriving(self) -> int:
        """Sequences whose KV another worker sends."""
        raise NotImplementedError

    @property
    def waiting_prefill_tokens(self) -> int:
        """Prompt tokens still to compute here, running chunks included."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Assert that pool and tables agree."""
        raise NotImplementedError


_ = BlockId
