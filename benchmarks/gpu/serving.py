"""A split request served on the card: a prefill and a decode worker with `--device cuda`, the demo model between them.

In bfloat16 its greedy tokens must be those of one mixed worker on the same card, in float32 throughout those of the
reference on the host.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.nodes import MODEL_NAME, Cluster, run_cluster

PROMPT = "The capital of France is Paris, and the capital of Italy is Rome. " * 40
OUTPUT_TOKENS = 32
SPLIT = {"p": "prefill", "d": "decode"}
MIXED = {"m": "mixed"}
ON_CARD = ["--device", "cuda"]
ON_HOST = ["--device", "cpu", "--kernel-backend", "reference"]
HALF = ["--dtype", "bfloat16"]
WHOLE = ["--dtype", "float32", "--weight-format", "expanded"]
SPLIT_ALWAYS = ["--split-min-tokens", "1"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy completion.

    text: of the answer. num_sessions: KV sessions that were completed for it.
    kernels: what each worker says it computes with.
    """

    text: str
    num_sessions: float
    kernels: dict[str, str]


def run() -> dict[str, Any]:
    """Whether split requests gave a mixed worker's tokens, and the reference's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        return {
            "split, bfloat16": _compared(
                ask(path / "half", SPLIT, [*ON_CARD, *HALF]),
                ask(path / "half mixed", MIXED, [*ON_CARD, *HALF]),
            ),
            "split, float32": _compared(
                ask(path / "whole", SPLIT, [*ON_CARD, *WHOLE]),
                ask(path / "reference", MIXED, [*ON_HOST, *WHOLE]),
            ),
        }


def _compared(split: Answer, expected: Answer) -> dict[str, Any]:
    """A split answer from the card beside the one that it must equal."""
    is_on_card = all(kernels.startswith("triton (") for kernels in split.kernels.values())
    is_equal = split.text == expected.text
    return {
        "kernels": split.kernels,
        "compared_with": expected.kernels,
        "sessions_completed": split.num_sessions,
        "tokens_equal": is_equal,
        "is_right": is_on_card and split.num_sessions > 0 and is_equal,
    }


def ask(folder: Path, roles: Mapping[str, str], worker_arguments: list[str]) -> Answer:
    """Start a cluster, ask it once, and stop it."""
    with run_cluster(
        folder, dict(roles), worker_arguments=worker_arguments, gateway_arguments=SPLIT_ALWAYS
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
        text = str(response.json()["choices"][0]["text"])
        return Answer(text, _sessions(cluster), _kernels(cluster))


def _sessions(cluster: Cluster) -> float:
    return sum(
        worker.metrics().get("baton:sessions_completed_total", 0.0)
        for worker in cluster.workers.values()
    )


def _kernels(cluster: Cluster) -> dict[str, str]:
    return {
        name: str(httpx.get(worker.health_url, timeout=5.0).json()["kernels"])
        for name, worker in cluster.workers.items()
    }
