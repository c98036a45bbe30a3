"""A worker's metrics: what the engine counts, under the names that dashboards know."""

from prometheus_client.parser import text_string_to_metric_families

from engine.stats import EngineStats
from services.worker.metrics import WorkerMetrics


def samples(stats: EngineStats) -> dict[str, float]:
    """Sample name, with its `source` if it has one -> value."""
    metrics = WorkerMetrics("demo", "w1")
    metrics.stats = stats
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            source = sample.labels.get("source", "")
            found[f"{sample.name} {source}".strip()] = sample.value
    return found


def test_what_tiers_gave_counts_once_as_cached() -> None:
    found = samples(
        EngineStats(
            prompt_tokens_total=1000,
            computed_prompt_tokens_total=400,
            cached_prompt_tokens_total=500,
            received_prompt_tokens_total=100,
            prefix_cache_queries_total=1000,
            prefix_cache_hits_total=200,
            tier_queries_total=800,
            tier_hits_total=300,
            declined_load_tokens_total=64,
        )
    )
    by_source = {
        name.split()[1]: value
        for name, value in found.items()
        if name.startswith("vllm:prompt_tokens_by_source_total")
    }
    assert by_source == {
        "local_compute": 400,
        "local_cache_hit": 500,
        "external_kv_transfer": 100,
    }
    assert sum(by_source.values()) == found["vllm:prompt_tokens_total"] == 1000
    assert found["vllm:prompt_tokens_cached_total"] == 500
    assert found["vllm:prefix_cache_hits_total"] == 200
    assert found["vllm:external_prefix_cache_queries_total"] == 800
    assert found["vllm:external_prefix_cache_hits_total"] == 300
    assert found["baton:declined_load_tokens_total"] == 64


def test_a_sequence_whose_kv_is_on_its_way_waits() -> None:
    found = samples(EngineStats(num_running=9, num_waiting=1, num_arriving=2, num_loading=4))
    assert found["vllm:num_requests_running"] == 9
    assert found["vllm:num_requests_waiting"] == 7
    assert found["baton:arriving_sequences"] == 2
    assert found["baton:loading_sequences"] == 4
