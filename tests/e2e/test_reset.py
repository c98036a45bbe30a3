"""An operator empties the caches of a running cluster: a warm prompt is computed again, and gives the same answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.nodes import MODEL_NAME, run_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = list(range(500, 700))
ADMIN = {"Authorization": "Bearer root"}


def test_a_warm_prompt_is_cold_after_a_reset(logs: Path) -> None:
    with run_cluster(
        logs / "reset", {"m": "mixed"}, gateway_arguments=["--admin-api-key", "root"]
    ) as cluster:
        cold, warm = complete(cluster.url), complete(cluster.url)
        cluster.wait_idle()
        assert num_cached(cold) == 0
        assert num_cached(warm) == 192
        assert httpx.post(f"{cluster.url}/reset_prefix_cache").status_code == 401
        assert num_cached(complete(cluster.url)) == 192
        cluster.wait_idle()
        answer = httpx.post(f"{cluster.url}/reset_prefix_cache", headers=ADMIN, timeout=30.0)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"workers": [{"id": "m", "status": "ok", "num_kept_blocks": 0}]}
        again = complete(cluster.url)
        assert num_cached(again) == 0
        assert again["choices"][0]["text"] == cold["choices"][0]["text"]
        cluster.wait_idle()


def complete(url: str) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def num_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
