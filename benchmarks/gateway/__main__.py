"""`make bench-gateway`: processor time a token, tokens a second, and what the gateway adds to a first token.

One gateway between one model-free worker and many streaming clients, each a process of its own. `paced` runs as many
streams as a busy decode worker has, at a decode worker's pace; `flat out` sends tokens as fast as they are taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.gateway.talker import MODEL
from benchmarks.report import print_table, write

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of round. step_ms: pace of the worker, 0 for as fast as possible."""

    name: str
    num_streams: int
    num_tokens: int
    step_ms: float


LOADS = (
    Load("paced: 200 streams, 20 tokens/s each", 200, 100, 50.0),
    Load("flat out: 200 streams", 200, 300, 0.0),
    Load("flat out: 1 stream", 1, 2000, 0.0),
)


def main() -> None:
    """Run all loads and state the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.gateway")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    figures = {load.name: [measure(load) for _ in range(rounds)] for load in LOADS}
    rows = [
        [
            name,
            *(
                statistics.median(round_[key] for round_ in raw)
                for key in ("tokens_per_s", "cpu_us_per_token", "core_share", "first_token_ms")
            ),
        ]
        for name, raw in figures.items()
    ]
    header = ["load", "tokens/s", "CPU us a token", "share of a core", "first token ms"]
    print_table("The gateway alone", header, rows)
    print(write("gateway", {"rounds": figures}))


def measure(load: Load) -> dict[str, float]:
    """One round of one load."""
    with _process("benchmarks.gateway.talker", str(load.step_ms)) as talker:
        address = talker.stdout.readline().strip() if talker.stdout else ""
        flags = ["--seed", address, "--port", "0", "--log-level", "warning"]
        with _process("services.cli.main", "gateway", *flags) as gateway:
            url = gateway.stdout.readline().split()[-1] if gateway.stdout else ""
            port = int(url.rpartition(":")[2])
            return asyncio.run(_load(load, port, gateway.pid))


async def _load(load: Load, port: int, gateway_pid: int) -> dict[str, float]:
    await _stream(port, 2, retry=True)
    cpu_before, started = _cpu_s(gateway_pid), time.perf_counter()
    first_tokens = await asyncio.gather(
        *(_stream(port, load.num_tokens) for _ in range(load.num_streams))
    )
    elapsed_s = time.perf_counter() - started
    cpu_s = _cpu_s(gateway_pid) - cpu_before
    num_tokens = load.num_streams * load.num_tokens
    return {
        "tokens_per_s": num_tokens / elapsed_s,
        "cpu_us_per_token": cpu_s / num_tokens * 1e6,
        "core_share": cpu_s / elapsed_s,
        "first_token_ms": statistics.median(first_tokens) * 1000,
    }


async def _stream(port: int, num_tokens: int, *, retry: bool = False) -> float:
    """Read one stream to its end over a plain socket; returns the seconds to its first token."""
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": num_tokens, "stream": True}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    while True:
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " in status or not retry:
            break
        writer.close()
        await asyncio.sleep(0.05)
    await reader.readuntil(b"data: ")
    first_token_s = time.perf_counter() - started
    received = await reader.read()
    writer.close()
    assert b"[DONE]" in received, status
    return first_token_s


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


if __name__ == "__main__":
    main()
