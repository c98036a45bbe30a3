"""A split request served on the card: a prefill and a decode worker with `--device cuda`, the demo model between them.

Greedy tokens must be those of one mixed worker on the same card. Without the flag the step is skipped, and says so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from tests.support.nodes import MODEL_NAME, Cluster, run_cluster

PROMPT = "The capital of France is Paris, and the capital of Italy is Rome. " * 40
OUTPUT_TOKENS = 32
WORKER_ARGUMENTS = ["--device", "cuda", "--dtype", "bfloat16"]
SPLIT_ALWAYS = ["--split-min-tokens", "1"]


def run() -> dict[str, Any]:
    """Whether a split request gave a mixed worker's tokens."""
    if not _knows_device():
        return {"skipped": "`baton decode` has no flag --device"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        split, num_sessions = _answer(path / "split", {"p": "prefill", "d": "decode"})
        mixed, _ = _answer(path / "mixed", {"m": "mixed"})
    return {
        "sessions_completed": num_sessions,
        "tokens_equal": split == mixed,
        "is_right": num_sessions > 0 and split == mixed,
    }


def _knows_device() -> bool:
    command = [sys.executable, "-m", "services.cli.main", "decode", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return "--device" in done.stdout


def _answer(folder: Path, roles: dict[str, str]) -> tuple[str, float]:
    """The text of one greedy completion, and how many KV sessions were completed for it."""
    with run_cluster(
        folder, roles, worker_arguments=WORKER_ARGUMENTS, gateway_arguments=SPLIT_ALWAYS
    ) as cluster:
        cluster.wait_routable()
        body = {
            "model": MODEL_NAME,
            "prompt": PROMPT,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
        }
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300.0)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"]), _sessions(cluster)


def _sessions(cluster: Cluster) -> float:
    return sum(
        worker.metrics().get("baton:sessions_completed_total", 0.0)
        for worker in cluster.workers.values()
    )
