"""A worker that is killed comes back with its prefixes: from disk, verified, and never from a damaged block."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.nodes import MODEL_NAME, Cluster, run_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NUM_PROMPT_TOKENS, NUM_TOKENS, BLOCK_SIZE = 600, 12, 16
NUM_CACHED = (NUM_PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
LOADED = "baton:tier_loaded_blocks_total"
DAMAGED = "baton:tier_damaged_blocks_total"


def test_a_killed_worker_serves_old_prefixes_from_disk(tmp_path: Path) -> None:
    arguments = [
        "--kv-offloading-disk-dir",
        str(tmp_path / "kv"),
        "--kv-offloading-disk-size",
        "0.1",
    ]
    chance = random.Random(11)
    prompt = [chance.randrange(100, 40_000) for _ in range(NUM_PROMPT_TOKENS)]
    with run_cluster(tmp_path, {"m": "mixed"}, worker_arguments=arguments) as cluster:
        cold, computed = ask(cluster, prompt), num_computed(cluster)
        assert (cold["cached"], computed) == (0, NUM_PROMPT_TOKENS)
        warm = ask(cluster, prompt)  # used twice: worth a place on disk
        assert warm == {**cold, "cached": NUM_CACHED}
        assert cluster.workers["m"].metrics()["baton:tier_stored_blocks_total"] == NUM_CACHED // 16

        come_back(cluster)
        assert ask(cluster, prompt) == {**cold, "cached": NUM_CACHED}
        assert num_computed(cluster) == NUM_PROMPT_TOKENS - NUM_CACHED
        metrics = cluster.workers["m"].metrics()
        assert (metrics[LOADED], metrics[DAMAGED]) == (NUM_CACHED // BLOCK_SIZE, 0)

        cluster.workers["m"].kill()
        flip_a_byte_of_every_block(tmp_path / "kv" / "worker-0" / "blocks")
        come_back(cluster)
        assert ask(cluster, prompt) == cold
        assert num_computed(cluster) == NUM_PROMPT_TOKENS
        metrics = cluster.workers["m"].metrics()
        assert (metrics[LOADED], metrics[DAMAGED]) == (0, NUM_CACHED // BLOCK_SIZE)
        cluster.wait_idle()


def ask(cluster: Cluster, prompt: list[int]) -> dict[str, Any]:
    """What is answered, and how much of the prompt was cached; the worker is at rest afterwards."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60.0).json()
    cluster.wait_idle()
    (choice,) = answer["choices"]
    return {
        "text": choice["text"],
        "logprobs": choice["logprobs"],
        "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    }


def num_computed(cluster: Cluster) -> int:
    """Prompt tokens computed since the worker started."""
    return cluster.workers["m"].num_computed_prompt_tokens


def come_back(cluster: Cluster) -> None:
    worker = cluster.workers["m"]
    worker.kill()
    worker.start()
    worker.wait_ready()
    cluster.wait_routable()


def flip_a_byte_of_every_block(path: Path) -> None:
    block_bytes = path.stat().st_size // (NUM_CACHED // BLOCK_SIZE)
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size, block_bytes):
            file.seek(start + 1000)
            byte = file.read(1)[0]
            file.seek(start + 1000)
            file.write(bytes([byte ^ 0x10]))
