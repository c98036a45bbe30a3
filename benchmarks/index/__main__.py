"""`make bench-index`: the index in a real server on this machine, beside a bare round trip to it.

A ratio is a call's median over the median of PING on the same connection in the same rounds: what the index adds to a
round trip. Server time is what the server counts for the script, without the way there and the reading of the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import report
from core.block_hash import BlockHash
from core.events import Tier
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.config import IndexConfig
from kvindex.redis_index import RedisIndex
from services.cluster.valkey import ValkeyServer
from tests.support.index_values import ROOT, create_chain, create_worker, removed, stored
from tests.support.valkey import command, running_valkey

LEASE_MS = 600_000
CALLS_A_ROUND = 100

Call = Callable[[], Awaitable[Any]]


def connect(server: ValkeyServer, prefix: str) -> RedisIndex:
    """An index of its own in the server."""
    return RedisIndex(
        IndexConfig(redis_url=server.url, key_prefix=prefix, command_timeout_ms=60_000)
    )


async def join(index: RedisIndex, name: str) -> None:
    """Make a worker a candidate."""
    worker = create_worker(name)
    await index.register(worker, LEASE_MS)
    await index.heartbeat(worker.id, worker.epoch, WorkerLoad(num_running=3), LEASE_MS)


async def milliseconds(call: Call, num_calls: int) -> list[float]:
    """How long each of `num_calls` calls took."""
    taken: list[float] = []
    for _ in range(num_calls):
        started_s = time.perf_counter()
        await call()
        taken.append((time.perf_counter() - started_s) * 1000)
    return taken


async def server_milliseconds(server: ValkeyServer, call: Call, num_calls: int) -> float:
    """What the server itself spends on one call of a script."""
    await command(server, "CONFIG", "RESETSTAT")
    for _ in range(num_calls):
        await call()
    counted = await command(server, "INFO", "commandstats")
    return float(counted["cmdstat_evalsha"]["usec_per_call"]) / 1000


async def paired(index: RedisIndex, call: Call, rounds: int) -> dict[str, Any]:
    """The call and PING in turn: medians, the slowest hundredth, their ratio, medians of the rounds."""
    taken: dict[str, list[list[float]]] = {"ping": [], "call": []}
    for _ in range(rounds):
        taken["ping"].append(await milliseconds(index.ping, CALLS_A_ROUND))
        taken["call"].append(await milliseconds(call, CALLS_A_ROUND))
    ping, mine = (sorted(ms for one in taken[side] for ms in one) for side in ("ping", "call"))
    return {
        "p50_ms": statistics.median(mine),
        "p99_ms": mine[len(mine) * 99 // 100],
        "ping_p50_ms": statistics.median(ping),
        "ratio_to_ping": statistics.median(mine) / statistics.median(ping),
        "rounds_ms": [statistics.median(one) for one in taken["call"]],
    }


async def fill(index: RedisIndex, num_workers: int, chain: list[BlockHash]) -> None:
    """Workers that hold the chain to different lengths, more of it on the host, and 2,000 other blocks each."""
    for number in range(num_workers):
        name = f"w{number:03d}"
        await join(index, name)
        worker = create_worker(name)
        length = (number * 97 + 500) % (len(chain) + 1)
        events = [
            stored(chain[:length]),
            stored(chain[: length + 100], Tier.HOST),
            stored(create_chain(2_000, name)),
        ]
        await index.publish(worker.id, worker.epoch, 1, events)


async def measure_match(server: ValkeyServer, rounds: int) -> list[dict[str, Any]]:
    """Match by number of workers and length of the chain."""
    rows: list[dict[str, Any]] = []
    whole = create_chain(1_000)
    for num_workers in (1, 8, 64):
        index = connect(server, f"match{num_workers}")
        await fill(index, num_workers, whole)
        for num_blocks in (0, 64, 1_000):
            chains = {ROOT.seed: whole[:num_blocks]}

            async def match(index: RedisIndex = index, chains: Any = chains) -> None:
                await index.match(chains)

            figures = await paired(index, match, rounds)
            figures["server_ms"] = await server_milliseconds(server, match, CALLS_A_ROUND)
            rows.append({"workers": num_workers, "blocks": num_blocks, **figures})
        await index.close()
    return rows


async def measure_speculation(server: ValkeyServer, rounds: int) -> dict[str, Any]:
    """Match while 200 routed chains of 1,000 blocks with a common head are expected on 8 workers."""
    index = connect(server, "speculation")
    head = create_chain(900, "common")
    for number in range(8):
        await join(index, f"w{number}")
    for number in range(200):
        chain = head + create_chain(100, f"tail {number}")
        await index.speculate(create_worker(f"w{number % 8}").id, chain, ttl_ms=LEASE_MS)
    asked = {ROOT.seed: head + create_chain(100, "tail 7")}

    async def match() -> None:
        await index.match(asked)

    figures = await paired(index, match, rounds)
    figures["server_ms"] = await server_milliseconds(server, match, CALLS_A_ROUND)
    await index.close()
    return figures


async def measure_publish(server: ValkeyServer, rounds: int) -> list[dict[str, Any]]:
    """Publish by number of hashes a call; half of the calls store, half remove the same again."""
    rows: list[dict[str, Any]] = []
    for num_hashes in (1, 32, 500, 2_000):
        index = connect(server, f"publish{num_hashes}")
        await join(index, "w0")
        worker, batch = create_worker("w0"), create_chain(num_hashes)
        number = 0

        async def publish(
            index: RedisIndex = index, batch: Any = batch, worker: WorkerInfo = worker
        ) -> None:
            nonlocal number
            number += 1
            event = stored(batch) if number % 2 else removed(batch[::-1])
            await index.publish(worker.id, worker.epoch, number, [event])

        figures = await paired(index, publish, rounds)
        figures["server_ms"] = await server_milliseconds(server, publish, CALLS_A_ROUND)
        figures["hashes_per_s"] = num_hashes / figures["p50_ms"] * 1000
        rows.append({"hashes": num_hashes, **figures})
        await index.close()
    return rows


async def measure_snapshot(server: ValkeyServer, rounds: int) -> dict[str, Any]:
    """A snapshot of 20,000 blocks in place of the same."""
    index = connect(server, "snapshot")
    await join(index, "w0")
    worker, held = create_worker("w0"), create_chain(20_000)
    taken: list[float] = []
    for number in range(rounds):
        started_s = time.perf_counter()
        await index.replace(worker.id, worker.epoch, number + 1, {Tier.DEVICE: held})
        taken.append((time.perf_counter() - started_s) * 1000)
    await index.close()
    return {"blocks": len(held), "p50_ms": statistics.median(taken), "rounds_ms": taken}


async def measure_memory(server: ValkeyServer) -> list[dict[str, Any]]:
    """Bytes that the server spends on a block of a worker's index."""
    rows: list[dict[str, Any]] = []
    for num_blocks in (100, 1_000, 10_000, 100_000):
        index = connect(server, f"memory{num_blocks}")
        await join(index, "w0")
        worker = create_worker("w0")
        await index.replace(worker.id, worker.epoch, 1, {Tier.DEVICE: create_chain(num_blocks)})
        [key] = await command(server, "KEYS", f"memory{num_blocks}:*:index:*")
        used = await command(server, "MEMORY", "USAGE", key, "SAMPLES", 0)
        rows.append({"blocks": num_blocks, "bytes": used, "bytes_a_block": used / num_blocks})
        await index.close()
    return rows


async def measure(server: ValkeyServer, rounds: int) -> dict[str, Any]:
    """All figures."""
    return {
        "server": (await command(server, "INFO", "server"))["redis_version"],
        "match": await measure_match(server, rounds),
        "match_with_200_expected_chains": await measure_speculation(server, rounds),
        "publish": await measure_publish(server, rounds),
        "snapshot": await measure_snapshot(server, rounds),
        "memory": await measure_memory(server),
    }


TIMES = ("p50_ms", "p99_ms", "server_ms", "ratio_to_ping")


def print_figures(figures: dict[str, Any]) -> None:
    """The tables."""
    header = ["workers", "blocks", *TIMES]
    rows = [[row[name] for name in header] for row in figures["match"]]
    report.print_table("match: one call a prompt", header, rows)
    expected = figures["match_with_200_expected_chains"]
    report.print_table(
        "match, 8 workers, 1,000 blocks, 200 expected chains", TIMES, [[expected[n] for n in TIMES]]
    )
    header = ["hashes", *TIMES, "hashes_per_s"]
    rows = [[row[name] for name in header] for row in figures["publish"]]
    report.print_table("publish: one call", header, rows)
    snapshot = figures["snapshot"]
    report.print_table("snapshot", ["blocks", "p50_ms"], [[snapshot["blocks"], snapshot["p50_ms"]]])
    header = ["blocks", "bytes", "bytes_a_block"]
    rows = [[row[name] for name in header] for row in figures["memory"]]
    report.print_table("memory of a worker's index", header, rows)


def main() -> None:
    """Measure, print, write results/index.json."""
    parser = argparse.ArgumentParser(prog="bench-index")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with running_valkey() as server:
        figures = asyncio.run(measure(server, rounds))
    print_figures(figures)
    report.write("index", figures)


if __name__ == "__main__":
    main()
