"""What an engine counts and holds, as its front is told with every step.

Plain messages, like those of `engine.messages`; the metrics of a worker are made of them.
"""

from __future__ import annotations

import msgspec

from core.events import Tier


class TierStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Gauges and counters of one tier below the device pool.

    num_blocks, capacity_blocks, block_bytes: blocks held or being written, the most there can be, and the size of one.
    waiting_store_blocks: of those being written, the ones whose bytes are not there yet.
    stored_blocks_total .. foreign_blocks_total: as kvtransfer.tiers.base.TierCounters says.
    load_seconds_total, store_seconds_total: time that the tier's mover spent on `loaded_blocks_total` blocks and on
        those it wrote.
    policy: what the eviction policy says of itself, by name (for ARC target, t1, t2, b1, b2, b1_hits_total,
        b2_hits_total).
    """

    tier: Tier
    num_blocks: int = 0
    capacity_blocks: int = 0
    block_bytes: int = 0
    waiting_store_blocks: int = 0
    stored_blocks_total: int = 0
    loaded_blocks_total: int = 0
    evicted_blocks_total: int = 0
    refused_stores_total: int = 0
    unadmitted_blocks_total: int = 0
    failed_blocks_total: int = 0
    damaged_blocks_total: int = 0
    foreign_blocks_total: int = 0
    load_seconds_total: float = 0.0
    store_seconds_total: float = 0.0
    policy: dict[str, float] = {}


class EngineStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Gauges (as of this step) and counters (since the engine started) of one engine.

    num_arriving: sequences whose KV another worker is sending. num_held_blocks: blocks with a reference.
    num_open_sessions: sessions of both directions. num_quarantined_blocks: blocks given up with a writer inside.
    kv_cache_usage: share of allocatable blocks that are not free.
    exposed_bytes_total: KV bytes not yet acknowledged when the last kernel of their prompt had ended.
    num_loading: sequences whose KV is read back from a tier. tier_queries_total, tier_hits_total: prompt tokens that
        tiers were asked for, and that came back. declined_load_tokens_total: tokens whose load would have taken longer
        than to compute them. tiers: one entry a tier, nearest first.
    Counters: *_total, tokens, bytes or events as named; late_runs_total counts runs that went to scratch.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_arriving: int = 0
    num_held_blocks: int = 0
    num_free_blocks: int = 0
    num_open_sessions: int = 0
    num_live_permits: int = 0
    num_quarantined_blocks: int = 0
    kv_cache_usage: float = 0.0
    waiting_prefill_tokens: int = 0
    steps_total: int = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    computed_prompt_tokens_total: int = 0
    cached_prompt_tokens_total: int = 0
    received_prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    sessions_opened_total: int = 0
    sessions_completed_total: int = 0
    sessions_failed_total: int = 0
    local_prefill_fallbacks_total: int = 0
    blocks_acknowledged_total: int = 0
    blocks_outstanding: int = 0
    sent_bytes_total: int = 0
    exposed_bytes_total: int = 0
    received_bytes_total: int = 0
    late_runs_total: int = 0
    checksum_errors_total: int = 0
    refused_connections_total: int = 0
    integrity_violations_total: int = 0
    num_loading: int = 0
    tier_queries_total: int = 0
    tier_hits_total: int = 0
    declined_load_tokens_total: int = 0
    tiers: list[TierStats] = []
