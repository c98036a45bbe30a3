"""A second request over a shared 1,500-token prefix: its whole blocks told as cached, and none of it computed again.

What that is worth in time to first token is `make bench-engine`'s business.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.nodes import MODEL_NAME, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PREFIX_TOKENS, NEW_TOKENS, BLOCK_SIZE = 1500, 32, 16
NUM_CACHED = PREFIX_TOKENS // BLOCK_SIZE * BLOCK_SIZE
TEXT = Path(__file__).parents[1] / "data" / "longtext" / "shakespeare_100KB.txt"


@pytest.mark.parametrize("kind", ["mixed_cluster", "split_cluster"])
def test_a_shared_prefix_is_not_computed_again(kind: str, request: pytest.FixtureRequest) -> None:
    cluster: Cluster = request.getfixturevalue(kind)
    tokens = tokenize(cluster)
    prefix = tokens[:PREFIX_TOKENS]
    tails = [tokens[start : start + NEW_TOKENS] for start in (2_000, 3_000)]
    at_start = num_computed(cluster)
    first = complete(cluster, prefix + tails[0])
    after_first = num_computed(cluster)
    second = complete(cluster, prefix + tails[1])
    after_second = num_computed(cluster)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == NUM_CACHED
    assert after_first - at_start == PREFIX_TOKENS + NEW_TOKENS
    assert after_second - after_first == NEW_TOKENS, "the block that the first tail ends is copied"
    cluster.wait_idle()


def test_another_salt_shares_nothing(mixed_cluster: Cluster) -> None:
    prompt = tokenize(mixed_cluster)[4_000:4_200]
    usages = [
        complete(mixed_cluster, prompt, cache_salt=salt)["prompt_tokens_details"]["cached_tokens"]
        for salt in ("one", "one", "two")
    ]
    assert usages == [0, 192, 0]


def num_computed(cluster: Cluster) -> int:
    cluster.wait_idle()
    return sum(worker.num_computed_prompt_tokens for worker in cluster.workers.values())


def tokenize(cluster: Cluster) -> list[int]:
    body = {"model": MODEL_NAME, "prompt": TEXT.read_text()[:40_000]}
    response = httpx.post(f"{cluster.url}/tokenize", json=body, timeout=30.0)
    tokens: list[int] = response.json()["tokens"]
    assert len(tokens) > 5_000
    return tokens


def complete(cluster: Cluster, prompt: list[int], **extra: object) -> dict[str, dict[str, int]]:
    """The usage of one short greedy completion."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0, **extra}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120.0)
    assert response.status_code == 200, response.text
    usage: dict[str, dict[str, int]] = response.json()["usage"]
    return usage
