"""The metrics of the tiers below the device pool: every figure of a tier, and the totals that the peer has names for.

A family is there also where no tier is: without samples, as nothing is known to be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from core.events import Tier
from engine.stats import TierStats

_TOTAL = "_total"

# (metric, field of TierStats, what it says)
_GAUGES = (
    ("blocks", "num_blocks", "Blocks in a tier, those being written included."),
    ("capacity_blocks", "capacity_blocks", "Blocks that a tier can hold."),
    ("block_bytes", "block_bytes", "Bytes of one block of a tier."),
    (
        "waiting_store_blocks",
        "waiting_store_blocks",
        "Blocks with a place in a tier whose bytes are not there yet.",
    ),
)
_COUNTERS = (
    ("stored_blocks", "stored_blocks_total", "Blocks written to a tier."),
    ("loaded_blocks", "loaded_blocks_total", "Blocks read back from a tier and verified."),
    ("evicted_blocks", "evicted_blocks_total", "Blocks that left a tier for others."),
    ("refused_stores", "refused_stores_total", "Stores for which a tier could make no room."),
    (
        "unadmitted_blocks",
        "unadmitted_blocks_total",
        "Blocks not used often enough to be stored.",
    ),
    ("failed_blocks", "failed_blocks_total", "Blocks whose write failed."),
    (
        "damaged_blocks",
        "damaged_blocks_total",
        "Blocks that did not read as they were written, or not at all.",
    ),
    (
        "foreign_blocks",
        "foreign_blocks_total",
        "Blocks found at the start that were written for other KV.",
    ),
    ("load_seconds", "load_seconds_total", "Time that a tier took to give blocks back."),
    ("store_seconds", "store_seconds_total", "Time that a tier took to take blocks in."),
)


class TierMetrics:
    """Names what an engine tells of its tiers. labels, values: those that every metric of the worker bears."""

    def __init__(self, labels: Sequence[str], values: Sequence[str]) -> None:
        self._labels = tuple(labels)
        self._values = tuple(values)

    def collect(self, tiers: Sequence[TierStats]) -> Iterator[Metric]:
        """All families, each with a sample a tier."""
        yield from self._peer_families(tiers)
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(f"baton:tier_{name}", text, labels=(*self._labels, "tier"))
            self._fill(gauge, [((tier.tier,), getattr(tier, field)) for tier in tiers])
            yield gauge
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(
                f"baton:tier_{name}", text, labels=(*self._labels, "tier")
            )
            self._fill(counter, [((tier.tier,), getattr(tier, field)) for tier in tiers])
            yield counter
        yield from self._policy_families(tiers)

    def _peer_families(self, tiers: Sequence[TierStats]) -> Iterator[Metric]:
        """What the peer has names for: totals over all tiers, and how full the host tier is."""
        totals = (
            ("load_bytes", "KV bytes read back from tiers.", _bytes(tiers, "loaded_blocks_total")),
            ("store_bytes", "KV bytes written to tiers.", _bytes(tiers, "stored_blocks_total")),
            (
                "load_time",
                "Seconds that tiers took to give blocks back.",
                sum(tier.load_seconds_total for tier in tiers),
            ),
            (
                "store_time",
                "Seconds that tiers took to take blocks in.",
                sum(tier.store_seconds_total for tier in tiers),
            ),
        )
        for name, text, total in totals:
            counter = CounterMetricFamily(f"vllm:kv_offload_{name}", text, labels=self._labels)
            self._fill(counter, [((), total)])
            yield counter
        usage = GaugeMetricFamily(
            "vllm:kv_offload_cpu_cache_usage_perc",
            "Share of the host tier's blocks in use, 1 is all.",
            labels=self._labels,
        )
        self._fill(
            usage,
            [
                ((), tier.num_blocks / tier.capacity_blocks)
                for tier in tiers
                if tier.tier is Tier.HOST and tier.capacity_blocks
            ],
        )
        yield usage

    def _policy_families(self, tiers: Sequence[TierStats]) -> Iterator[Metric]:
        """What eviction policies say of themselves; a figure's name tells whether it only grows."""
        labels = (*self._labels, "tier", "figure")
        figures = [
            (tier.tier, name, value) for tier in tiers for name, value in tier.policy.items()
        ]
        gauge = GaugeMetricFamily(
            "baton:tier_policy", "What a tier's eviction policy holds now.", labels=labels
        )
        self._fill(gauge, [((t, n), v) for t, n, v in figures if not n.endswith(_TOTAL)])
        yield gauge
        counter = CounterMetricFamily(
            "baton:tier_policy_events", "What a tier's eviction policy has counted.", labels=labels
        )
        self._fill(
            counter, [((t, n.removesuffix(_TOTAL)), v) for t, n, v in figures if n.endswith(_TOTAL)]
        )
        yield counter

    def _fill(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        samples: Iterable[tuple[tuple[str, ...], float]],
    ) -> None:
        for values, value in samples:
            family.add_metric((*self._values, *values), value)


def _bytes(tiers: Sequence[TierStats], field: str) -> int:
    return sum(getattr(tier, field) * tier.block_bytes for tier in tiers)
