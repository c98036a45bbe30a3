"""Four clusters, asked in turn with prompts that none has seen."""

from __future__ import annotations

import asyncio
import random
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engine.splitting import Timing, ask, random_prompt
from tests.support.nodes import Cluster, run_cluster
from tests.support.valkey import running_valkey

LENGTHS = (1000, 2000)
SPLIT = {"p": "prefill", "d": "decode"}
_ALL_THREADS = 0


def run(rounds: int, worker_arguments: list[str]) -> dict[str, Any]:
    """Every length on every cluster; prints tables, returns medians, ratios and raw rounds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start = partial(_start, stack, folder, worker_arguments)
        clusters = {
            "mixed": start("mixed", {"m": "mixed"}),
            "split": start("split", SPLIT),
            "split, tcp": start("tcp", SPLIT, "--ipc-dir", "none"),
        }
        rate = _half_of_prefill(clusters["mixed"], clusters["split, tcp"])
        slow = ("--ipc-dir", "none", "--link-rate", str(int(rate)))
        clusters["split, slow"] = start("slow", SPLIT, *slow)
        for length in LENGTHS:  # the first request of a pair of workers shakes hands
            for number, cluster in enumerate(clusters.values()):
                _second_token_ms(cluster, length, seed=-1 - number)
        figures = {str(length): _of_length(clusters, length, rounds) for length in LENGTHS}
    print(f"\nslow link: {rate / 1e6:.3g} MB/s")
    for title, kind in (("ms to the second token", "second_ms"), ("ms to the first", "first_ms")):
        rows = [(name, *(f[kind][name] for f in figures.values())) for name in clusters]
        report.print_table(title, ("cluster", *(f"{length} in" for length in LENGTHS)), rows)
    rows = [
        (name, *(f["ratios"][name] for f in figures.values()))
        for name in next(iter(figures.values()))["ratios"]
    ]
    report.print_table("ratios", ("ratio", *(f"{length} in" for length in LENGTHS)), rows)
    return {"link_rate_bytes_s": rate, "lengths": figures}


def _of_length(clusters: dict[str, Cluster], length: int, rounds: int) -> dict[str, Any]:
    print(f"{length} tokens", flush=True)
    timings: dict[str, list[Timing]] = {name: [] for name in clusters}
    before = {name: _sent_and_exposed(cluster) for name, cluster in clusters.items()}
    for number in range(rounds):
        for name, cluster in clusters.items():
            cluster.wait_idle()
            timings[name].append(_ask_one(cluster, length, seed=number))
        print(f"  round {number + 1} of {rounds}", flush=True)
    second = report.medians({n: [t.second_s * 1e3 for t in ts] for n, ts in timings.items()})
    first = report.medians({n: [t.first_s * 1e3 for t in ts] for n, ts in timings.items()})
    ratios = {f"{n} / mixed, second token": second[n] / second["mixed"] for n in second}
    del ratios["mixed / mixed, second token"]
    for name, cluster in clusters.items():
        if name != "mixed":
            sent, exposed = (
                now - then
                for now, then in zip(_sent_and_exposed(cluster), before[name], strict=True)
            )
            ratios[f"{name}: bytes after the last kernel"] = exposed / sent
    hidden = 1 - (second["split, slow"] - second["split, tcp"]) / (first["mixed"] / 2)
    ratios["split, slow: transfer hidden"] = hidden
    rounds_ms = {n: [t.second_s * 1e3 for t in ts] for n, ts in timings.items()}
    return {"second_ms": second, "first_ms": first, "ratios": ratios, "rounds_ms": rounds_ms}


def _half_of_prefill(mixed: Cluster, split: Cluster) -> float:
    """Bytes a second at which a transfer takes half of the time that the prompt's prefill does."""
    length = max(LENGTHS)
    _ask_one(mixed, length, seed=-10)
    prefill_s = min(_ask_one(mixed, length, seed=-20 - i).first_s for i in range(3))
    before, _ = _sent_and_exposed(split)
    _ask_one(split, length, seed=-30)
    split.wait_idle()
    return (_sent_and_exposed(split)[0] - before) / (prefill_s / 2)


def _sent_and_exposed(cluster: Cluster) -> tuple[float, float]:
    metrics = [worker.metrics() for worker in cluster.workers.values()]
    names = ("baton:sent_bytes_total", "baton:exposed_bytes_total")
    sent, exposed = (sum(m[name] for m in metrics) for name in names)
    return sent, exposed


def _second_token_ms(cluster: Cluster, length: int, seed: int) -> float:
    return _ask_one(cluster, length, seed).second_s * 1e3


def _ask_one(cluster: Cluster, length: int, seed: int) -> Timing:
    prompt = random_prompt(random.Random(f"{length} tokens, {seed}"), length)
    (timing,) = asyncio.run(ask(cluster.url, [prompt], 8))
    return timing


def _start(
    stack: ExitStack,
    folder: Path,
    all_arguments: list[str],
    name: str,
    roles: dict[str, str],
    *arguments: str,
) -> Cluster:
    redis = stack.enter_context(running_valkey())
    return stack.enter_context(
        run_cluster(
            folder / name,
            roles,
            redis_url=redis.url,
            worker_arguments=[*all_arguments, *arguments],
            threads=_ALL_THREADS,
        )
    )
