"""The price of splitting on the same cores: real clusters behind their gateways, asked in turn.

    split        one prefill and one decode worker, a thread each
    two mixed    two mixed workers, a thread each
    one mixed    one mixed worker, two threads

All clusters stay up for the whole run; an idle worker waits without spinning, so only the one that is asked works.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks import report
from tests.support.nodes import MODEL_NAME, Cluster, run_cluster
from tests.support.valkey import running_valkey

PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 32
NUM_STREAMS, STREAM_PROMPT, STREAM_OUTPUT = 8, 256, 32
PREFIX_TOKENS, NEW_TOKENS = 1500, 32
VOCAB = 49_000

KINDS: dict[str, tuple[dict[str, str], int]] = {
    "split": ({"p": "prefill", "d": "decode"}, 1),
    "two mixed": ({"m1": "mixed", "m2": "mixed"}, 1),
    "one mixed": ({"m": "mixed"}, 2),
}


class Timing(NamedTuple):
    """One answer, seconds from sending: first and second token, and the gaps after those."""

    first_s: float
    second_s: float
    per_token_s: float


def run(rounds: int) -> dict[str, Any]:
    """Every measure on every cluster, interleaved."""
    with _clusters() as clusters:
        raw: dict[str, dict[str, list[float]]] = {}
        for number in range(rounds):
            for name, cluster in clusters.items():
                for measure, value in _one_round(cluster, seed=number).items():
                    raw.setdefault(measure, {}).setdefault(name, []).append(value)
            print(f"  round {number + 1} of {rounds}", flush=True)
    figures: dict[str, Any] = {}
    rows = []
    for measure, by_name in raw.items():
        median = report.medians(by_name)
        ratios = {name: median["split"] / median[name] for name in KINDS if name != "split"}
        figures[measure] = {"median": median, "split_over": ratios, "rounds": by_name}
        rows.append((measure, *(median[name] for name in KINDS), *ratios.values()))
    report.print_table(
        "splitting on the same two cores",
        ("measure", *KINDS, *(f"split / {name}" for name in KINDS if name != "split")),
        rows,
    )
    return figures


@contextmanager
def _clusters() -> Iterator[dict[str, Cluster]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters = {}
        for name, (roles, threads) in KINDS.items():
            redis = stack.enter_context(running_valkey())
            clusters[name] = stack.enter_context(
                run_cluster(folder / name, roles, redis_url=redis.url, threads=threads)
            )
        yield clusters


def _one_round(cluster: Cluster, seed: int) -> dict[str, float]:
    chance = random.Random(seed)
    cluster.wait_idle()
    alone = asyncio.run(ask(cluster.url, [random_prompt(chance, PROMPT_TOKENS)], OUTPUT_TOKENS))[0]
    cluster.wait_idle()
    prompts = [random_prompt(chance, STREAM_PROMPT) for _ in range(NUM_STREAMS)]
    started = time.perf_counter()
    many = asyncio.run(ask(cluster.url, prompts, STREAM_OUTPUT))
    seconds = time.perf_counter() - started
    cluster.wait_idle()
    prefix = random_prompt(chance, PREFIX_TOKENS)
    first, second = (
        asyncio.run(ask(cluster.url, [prefix + random_prompt(chance, NEW_TOKENS)], 2))[0].first_s
        for _ in range(2)
    )
    return {
        f"TTFT ms, {PROMPT_TOKENS} in": alone.first_s * 1e3,
        "second token ms": alone.second_s * 1e3,
        "ms a token": alone.per_token_s * 1e3,
        f"{NUM_STREAMS} streams: TTFT ms": statistics.median(t.first_s for t in many) * 1e3,
        f"{NUM_STREAMS} streams: ms a token": statistics.median(t.per_token_s for t in many) * 1e3,
        f"{NUM_STREAMS} streams: output tokens/s": NUM_STREAMS * STREAM_OUTPUT / seconds,
        f"TTFT warm / cold, {PREFIX_TOKENS} shared": second / first,
    }


def random_prompt(chance: random.Random, length: int) -> list[int]:
    """Token ids that no cache holds."""
    return [chance.randrange(100, VOCAB) for _ in range(length)]


async def ask(url: str, prompts: list[list[int]], max_tokens: int) -> list[Timing]:
    """Send all at once and wait for every answer."""
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        return await asyncio.gather(*(_stream(client, prompt, max_tokens) for prompt in prompts))


async def _stream(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> Timing:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    times: list[float] = []
    started = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if '"token_ids":[' in line and '"token_ids":[]' not in line:
                times.append(time.perf_counter() - started)
    assert len(times) >= 2, "every token is told by itself"
    return Timing(times[0], times[1], (times[-1] - times[1]) / max(1, len(times) - 2))
