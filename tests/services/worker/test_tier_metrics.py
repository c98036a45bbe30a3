"""The metrics of tiers: every figure has a name, and families are there where no tier is."""

import msgspec
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from core.events import Tier
from engine.stats import EngineStats, TierStats
from kvtransfer.tiers.policies.arc import ArcPolicy
from kvtransfer.tiers.policies.lru import LruPolicy
from services.worker.metrics import WorkerMetrics

HOST = TierStats(
    tier=Tier.HOST,
    num_blocks=30,
    capacity_blocks=40,
    block_bytes=1000,
    waiting_store_blocks=2,
    stored_blocks_total=50,
    loaded_blocks_total=7,
    evicted_blocks_total=20,
    refused_stores_total=3,
    unadmitted_blocks_total=4,
    failed_blocks_total=5,
    damaged_blocks_total=6,
    foreign_blocks_total=8,
    load_seconds_total=0.25,
    store_seconds_total=1.5,
    policy={"target": 12.5, "t1": 10, "t2": 20, "b1": 5, "b2": 6, "b1_hits_total": 9},
)
DISK = TierStats(
    tier=Tier.DISK,
    num_blocks=100,
    capacity_blocks=400,
    block_bytes=1000,
    stored_blocks_total=11,
    loaded_blocks_total=2,
    load_seconds_total=0.5,
    store_seconds_total=2.0,
)


def families(*tiers: TierStats) -> dict[str, Metric]:
    metrics = WorkerMetrics("demo", "w1")
    metrics.stats = EngineStats(tiers=list(tiers))
    found = text_string_to_metric_families(metrics.render().decode())
    return {family.name: family for family in found}


def by_tier(family: Metric) -> dict[str, float]:
    return {sample.labels["tier"]: sample.value for sample in family.samples}


def by_figure(family: Metric) -> dict[tuple[str, str], float]:
    return {(s.labels["tier"], s.labels["figure"]): s.value for s in family.samples}


def test_every_figure_of_a_tier_has_a_metric() -> None:
    """A field that is added and not named here would be lost without a word."""
    found = families(HOST, DISK)
    for field in msgspec.structs.fields(TierStats):
        if field.name in ("tier", "policy"):
            continue
        is_counter = field.name.endswith("_total")
        name = "baton:tier_" + field.name.removesuffix("_total").removeprefix("num_")
        assert found[name].type == ("counter" if is_counter else "gauge"), name
        expected = {tier.tier.value: getattr(tier, field.name) for tier in (HOST, DISK)}
        assert by_tier(found[name]) == expected, name
        assert {s.labels["engine"] for s in found[name].samples} == {"w1"}


def test_the_peers_totals_are_of_all_tiers_and_its_usage_of_the_host_tier() -> None:
    found = families(HOST, DISK)
    expected = {"load_bytes": 9_000, "store_bytes": 61_000, "load_time": 0.75, "store_time": 3.5}
    for name, value in expected.items():
        [sample] = found[f"vllm:kv_offload_{name}"].samples
        assert (sample.name, sample.value) == (f"vllm:kv_offload_{name}_total", value)
        assert sample.labels == {"model_name": "demo", "engine": "w1"}
    [usage] = found["vllm:kv_offload_cpu_cache_usage_perc"].samples
    assert usage.value == 0.75
    assert families(DISK)["vllm:kv_offload_cpu_cache_usage_perc"].samples == []


def test_a_policy_tells_gauges_and_counters_apart() -> None:
    found = families(HOST, DISK)
    assert by_figure(found["baton:tier_policy"]) == {
        ("host", "target"): 12.5,
        ("host", "t1"): 10,
        ("host", "t2"): 20,
        ("host", "b1"): 5,
        ("host", "b2"): 6,
    }
    assert by_figure(found["baton:tier_policy_events"]) == {("host", "b1_hits"): 9}
    assert found["baton:tier_policy_events"].samples[0].name == "baton:tier_policy_events_total"


@pytest.mark.parametrize("policy", [ArcPolicy, LruPolicy])
def test_each_figure_of_a_real_policy_appears_once(policy: type) -> None:
    figures = policy(4).figures()
    found = families(TierStats(tier=Tier.HOST, policy=figures))
    gauges = {figure for _, figure in by_figure(found["baton:tier_policy"])}
    counters = {figure for _, figure in by_figure(found["baton:tier_policy_events"])}
    assert gauges | {f"{name}_total" for name in counters} == set(figures)


def test_every_family_is_there_without_a_tier() -> None:
    with_tiers, without = families(HOST, DISK), families()
    assert without.keys() == with_tiers.keys()
    for name, family in without.items():
        assert family.documentation, name
        assert family.type == with_tiers[name].type
        if name.startswith("baton:tier_"):
            assert family.samples == [], name
    assert [s.value for s in without["vllm:kv_offload_load_bytes"].samples] == [0]
