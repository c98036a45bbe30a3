"""What an engine tells of itself after a step: gauges, counters, and its place in the stream of cache events."""

from __future__ import annotations

from core.block_hash import BlockHash
from core.events import CacheEvent, Tier
from core.worker_info import WorkerLoad
from engine.channel import monotonic_ms
from engine.integrity import IdleCheck
from engine.kvcache.block_pool import BlockPool
from engine.messages import ChoiceOutput, StepDone
from engine.offload.offload import Offload
from engine.remote.decode_side import DecodeSide
from engine.remote.prefill_side import PrefillSide
from engine.scheduler.scheduler import Scheduler
from engine.stats import EngineStats
from kvtransfer.transports.choice import Receivers, Senders

SIGN_OF_LIFE_MS = 500.0
"""An engine that has nothing to tell says so this often: its front takes longer silence for a stopped engine.

What a front may set as its limit is well above it (`services.worker.config.LEAST_SILENCE_MS`).
"""


class Reporter:
    """Builds StepDone messages; numbers the events of this epoch from 1 without gaps."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        decode_side: DecodeSide,
        prefill_side: PrefillSide,
        receivers: Receivers,
        senders: Senders,
        idle_check: IdleCheck,
        offload: Offload,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._decode_side = decode_side
        self._prefill_side = prefill_side
        self._receivers = receivers
        self._senders = senders
        self._idle_check = idle_check
        self._offload = offload
        self._last = EngineStats()
        self._told_at_ms = 0.0
        self.last_event_number = 0

    def report(self, outputs: list[ChoiceOutput], events: list[CacheEvent]) -> StepDone | None:
        """The message; None when nothing has changed and a sign of life is not due yet."""
        stats, now_ms = self._stats(), monotonic_ms()
        is_news = bool(outputs or events or stats != self._last)
        if not is_news and now_ms - self._told_at_ms < SIGN_OF_LIFE_MS:
            return None
        self._last, self._told_at_ms = stats, now_ms
        first = self.last_event_number + 1
        self.last_event_number += len(events)
        return StepDone(outputs, events, first, self._load(stats), stats)

    def published(self) -> dict[Tier, list[BlockHash]]:
        """Every block that readers may know of."""
        return {Tier.DEVICE: self._pool.snapshot(), **self._offload.published()}

    def _load(self, stats: EngineStats) -> WorkerLoad:
        return WorkerLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting + stats.num_arriving + stats.num_loading,
            num_free_blocks=stats.num_free_blocks,
            waiting_prefill_tokens=stats.waiting_prefill_tokens,
        )

    def _stats(self) -> EngineStats:
        scheduler, pool, sessions = self._scheduler, self._pool, self._decode_side.counters
        totals = scheduler.counters
        received, sent = self._receivers.counters, self._senders.counters
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_arriving=scheduler.num_arriving,
            num_held_blocks=pool.num_held,
            num_free_blocks=pool.num_free,
            num_open_sessions=self._decode_side.num_arrivals + self._prefill_side.num_sessions,
            num_live_permits=pool.life.num_live_permits,
            num_quarantined_blocks=pool.num_quarantined,
            kv_cache_usage=pool.usage,
            waiting_prefill_tokens=scheduler.waiting_prefill_tokens,
            steps_total=totals.steps,
            preemptions_total=totals.preemptions,
            prompt_tokens_total=totals.prompt_tokens,
            computed_prompt_tokens_total=totals.computed_prompt_tokens,
            cached_prompt_tokens_total=totals.cached_prompt_tokens,
            received_prompt_tokens_total=totals.received_prompt_tokens,
            generation_tokens_total=totals.generation_tokens,
            prefix_cache_queries_total=totals.prefix_cache_queries,
            prefix_cache_hits_total=totals.prefix_cache_hits,
            sessions_opened_total=sessions.opened,
            sessions_completed_total=sessions.completed,
            sessions_failed_total=sessions.failed,
            local_prefill_fallbacks_total=sessions.local_fallbacks,
            blocks_acknowledged_total=sent.blocks_acknowledged_total,
            blocks_outstanding=sent.blocks_outstanding,
            sent_bytes_total=sent.sent_bytes_total,
            exposed_bytes_total=self._prefill_side.exposed_bytes_total,
            received_bytes_total=received.received_bytes_total,
            late_runs_total=received.late_runs_total,
            checksum_errors_total=received.checksum_errors_total,
            refused_connections_total=received.refused_connections_total,
            integrity_violations_total=self._idle_check.num_violations,
            num_loading=scheduler.num_loading,
            tier_queries_total=self._offload.loads.counters.queries,
            tier_hits_total=self._offload.loads.counters.hits,
            declined_load_tokens_total=self._offload.loads.counters.declined,
            tiers=self._offload.stats(),
        )
