"""A worker's metrics in the Prometheus format, read from the engine's last stats.

`vllm:*` names are those existing dashboards use; `baton:*` is what they have no name for. The
engine counts, this module only names; tiers are named in `tier_metrics`. Labels: model_name, engine (the
worker's id).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from engine.stats import EngineStats
from services.worker.tier_metrics import TierMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")

# (metric, field of EngineStats, what it says)
_GAUGES = (
    ("vllm:num_requests_running", "num_running", "Sequences in the running batch."),
    ("vllm:kv_cache_usage_perc", "kv_cache_usage", "Share of KV blocks in use, 1 is all."),
    ("baton:arriving_sequences", "num_arriving", "Sequences whose KV another worker is sending."),
    ("baton:loading_sequences", "num_loading", "Sequences whose KV is read back from a tier."),
    ("baton:held_blocks", "num_held_blocks", "KV blocks with a reference."),
    ("baton:free_blocks", "num_free_blocks", "KV blocks that can be allocated."),
    ("baton:open_sessions", "num_open_sessions", "KV transfer sessions of both directions."),
    ("baton:live_permits", "num_live_permits", "Rights to write into this worker's blocks."),
    (
        "baton:quarantined_blocks",
        "num_quarantined_blocks",
        "KV blocks given up with a writer inside.",
    ),
    ("baton:blocks_outstanding", "blocks_outstanding", "Blocks sent and not yet acknowledged."),
    (
        "baton:waiting_prefill_tokens",
        "waiting_prefill_tokens",
        "Prompt tokens queued and not computed.",
    ),
)
_FRONT_GAUGES = (
    ("baton:open_requests", "open_requests", "Requests owned here."),
    ("baton:open_prefill_streams", "open_prefill_streams", "Prefill streams, both sides."),
    ("baton:index_connected", "index_connected", "Whether the index answered the last call."),
    ("baton:index_in_step", "index_in_step", "Whether the index has every cache event."),
)
_COUNTERS = (
    ("vllm:num_preemptions", "preemptions_total", "Preemptions by recompute."),
    ("vllm:prompt_tokens", "prompt_tokens_total", "Prompt tokens, however they were obtained."),
    (
        "vllm:prompt_tokens_cached",
        "cached_prompt_tokens_total",
        "Prompt tokens found in the cache.",
    ),
    ("vllm:generation_tokens", "generation_tokens_total", "Tokens generated."),
    ("vllm:prefix_cache_queries", "prefix_cache_queries_total", "Tokens looked up in the cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits_total", "Tokens found in the cache."),
    (
        "vllm:external_prefix_cache_queries",
        "tier_queries_total",
        "Tokens looked up in the tiers below the pool.",
    ),
    (
        "vllm:external_prefix_cache_hits",
        "tier_hits_total",
        "Tokens whose KV came back from a tier.",
    ),
    (
        "baton:declined_load_tokens",
        "declined_load_tokens_total",
        "Tokens found in a tier and computed all the same, because that was faster.",
    ),
    ("baton:engine_steps", "steps_total", "Steps of the engine."),
    ("baton:sessions_opened", "sessions_opened_total", "KV transfer sessions opened."),
    ("baton:sessions_completed", "sessions_completed_total", "Sessions that ended complete."),
    ("baton:sessions_failed", "sessions_failed_total", "Sessions that were given up."),
    (
        "baton:local_prefill_fallbacks",
        "local_prefill_fallbacks_total",
        "Prompts computed here because no prefill worker could.",
    ),
    ("baton:blocks_acknowledged", "blocks_acknowledged_total", "Sent blocks that arrived."),
    ("baton:sent_bytes", "sent_bytes_total", "KV bytes sent."),
    (
        "baton:exposed_bytes",
        "exposed_bytes_total",
        "KV bytes not yet acknowledged when the last kernel of their prompt had ended.",
    ),
    ("baton:received_bytes", "received_bytes_total", "KV bytes received."),
    ("baton:late_runs", "late_runs_total", "Runs that came too late and went to scratch."),
    ("baton:checksum_errors", "checksum_errors_total", "Runs that arrived with a wrong checksum."),
    ("baton:refused_connections", "refused_connections_total", "Data connections refused."),
    (
        "baton:integrity_violations",
        "integrity_violations_total",
        "Times that the idle engine was found holding what nobody has asked for.",
    ),
)
# What came back from a tier was found in the cache: it has no source of its own, so that the sources add up.
_TOKEN_SOURCES = (
    ("local_compute", "computed_prompt_tokens_total"),
    ("local_cache_hit", "cached_prompt_tokens_total"),
    ("external_kv_transfer", "received_prompt_tokens_total"),
)


@dataclass(slots=True)
class FrontCounts:
    """What the front itself knows now.

    open_requests: requests owned here. open_prefill_streams: Prefill streams, both sides.
    index_connected, index_in_step: see `Registration`.
    """

    open_requests: int = 0
    open_prefill_streams: int = 0
    index_connected: bool = False
    index_in_step: bool = False


class WorkerMetrics:
    """The metrics of one worker. Set `stats` and `front`, then `render`.

    cache_config: facts about the KV cache, shown as labels.
    """

    def __init__(
        self, model_name: str, worker_id: str, cache_config: Mapping[str, str] | None = None
    ) -> None:
        self.stats = EngineStats()
        self.front = FrontCounts()
        self.finished: dict[str, int] = {}
        self._values = (model_name, worker_id)
        self._cache = dict(cache_config or {})
        self._tiers = TierMetrics(_LABELS, self._values)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_finished(self, reason: str) -> None:
        """One more choice ended for this reason."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def render(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks of a collector."""
        for name, field, text in _GAUGES:
            yield self._gauge(name, getattr(self.stats, field), text)
        # As its peer counts it: everything admitted and not in the batch.
        waiting = self.stats.num_waiting + self.stats.num_arriving + self.stats.num_loading
        yield self._gauge("vllm:num_requests_waiting", waiting, "Sequences not yet in the batch.")
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._values, getattr(self.stats, field))
            yield counter
        yield self._by_source()
        yield self._by_reason()
        yield self._cache_config()
        yield from self._tiers.collect(self.stats.tiers)
        for name, field, text in _FRONT_GAUGES:
            yield self._gauge(name, getattr(self.front, field), text)

    def _gauge(self, name: str, value: float, text: str) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric(self._values, value)
        return gauge

    def _cache_config(self) -> Metric:
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache, in labels.", labels=("engine", *self._cache)
        )
        family.add_metric((self._values[1], *self._cache.values()), 1)
        return family

    def _by_source(self) -> Metric:
        text = "Prompt tokens by where their KV came from."
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", text, labels=(*_LABELS, "source")
        )
        for source, field in _TOKEN_SOURCES:
            family.add_metric((*self._values, source), getattr(self.stats, field))
        return family

    def _by_reason(self) -> Metric:
        labels = (*_LABELS, "finished_reason")
        family = CounterMetricFamily("vllm:request_success", "Choices that ended.", labels=labels)
        for reason in ("stop", "length", "abort", "error"):
            family.add_metric((*self._values, reason), self.finished.get(reason, 0))
        return family
