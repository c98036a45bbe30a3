"""Clusters of real processes on the demo model, shared by the end-to-end tests of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cluster.valkey import ValkeyServer
from tests.support.nodes import Cluster, run_cluster
from tests.support.valkey import running_valkey


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """A server of its own, shared by the clusters that are not about losing it."""
    with running_valkey() as server:
        yield server


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes log."""
    return tmp_path_factory.mktemp("logs")


EXPANDED = ["--weight-format", "expanded"]
"""Weights in float32, for tests that hold answers against the oracle's float32 token by token."""


@pytest.fixture(scope="session")
def split_cluster(logs: Path, redis: ValkeyServer) -> Iterator[Cluster]:
    """One prefill and one decode worker, of two threads each."""
    roles = {"p": "prefill", "d": "decode"}
    with run_cluster(
        logs / "split", roles, redis_url=redis.url, worker_arguments=EXPANDED, threads=2
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mixed_cluster(logs: Path) -> Iterator[Cluster]:
    """One mixed worker of two threads, no Redis."""
    with run_cluster(
        logs / "mixed", {"m": "mixed"}, worker_arguments=EXPANDED, threads=2
    ) as cluster:
        yield cluster
