"""Redis is hints and leases: losing it costs cache hits, not requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.answers import Answer, ask_all, judge, mtbench_prompts
from tests.support.nodes import Cluster, run_cluster, wait_until
from tests.support.valkey import running_valkey

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EXPANDED = ["--weight-format", "expanded"]  # the oracle judges in float32
ROLES = {"p": "prefill", "d": "decode"}


def ask(cluster: Cluster, texts: list[str], max_tokens: int = 48) -> list[Answer]:
    return asyncio.run(ask_all(cluster.url, texts, max_tokens, concurrency=8))


def index_state(cluster: Cluster) -> str:
    state: str = httpx.get(f"{cluster.url}/health", timeout=5.0).json()["index"]
    return state


def matched_tokens(cluster: Cluster) -> float:
    """What the index has told the gateway to be cached, over all requests so far."""
    text = httpx.get(f"{cluster.url}/metrics", timeout=5.0).text
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("baton:route_expected_cached_tokens_total")
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextmanager
def cluster_of(folder: Path, redis_url: str) -> Iterator[Cluster]:
    with run_cluster(
        folder, ROLES, redis_url=redis_url, worker_arguments=EXPANDED, threads=2
    ) as cluster:
        yield cluster


def test_requests_outlive_redis_and_cache_routing_returns_with_it(logs: Path) -> None:
    texts = mtbench_prompts(24)
    with running_valkey() as redis, cluster_of(logs / "redis", redis.url) as cluster:

        async def stop_redis_midway() -> list[Answer]:
            asking = asyncio.create_task(ask_all(cluster.url, texts[:12], 48, concurrency=8))
            await asyncio.sleep(1.0)
            assert not asking.done()
            redis.kill()
            return await asking

        judge(asyncio.run(stop_redis_midway()), may_be_void=1)
        wait_until(lambda: index_state(cluster) != "connected", "the gateway says Redis is away")
        judge(ask(cluster, texts[12:]), may_be_void=1)
        before = matched_tokens(cluster)
        redis.restart()
        wait_until(lambda: index_state(cluster) == "connected", "the gateway is back")

        def hits() -> bool:
            return any(answer.cached_tokens for answer in ask(cluster, texts[:1], 4))

        wait_until(hits, "cached prefixes are found again")
        wait_until(
            lambda: bool(ask(cluster, texts[1:2], 4)) and matched_tokens(cluster) > before,
            "the index routes by prefix again",
        )
        cluster.wait_idle()


def test_a_cluster_born_without_redis_serves_and_joins_when_it_appears(
    logs: Path, held_port: int
) -> None:
    texts = mtbench_prompts(4)
    with cluster_of(logs / "late-redis", f"redis://127.0.0.1:{held_port}/0") as cluster:
        assert index_state(cluster) != "connected"
        judge(ask(cluster, texts), may_be_void=1)
        assert cluster.workers["d"].metrics()["baton:sessions_completed_total"] == len(texts)
        with running_valkey(port=held_port):
            wait_until(lambda: index_state(cluster) == "connected", "the gateway finds Redis")
            before = matched_tokens(cluster)
            wait_until(
                lambda: bool(ask(cluster, texts[:1], 4)) and matched_tokens(cluster) > before,
                "blocks stored before Redis came are in the index",
            )
