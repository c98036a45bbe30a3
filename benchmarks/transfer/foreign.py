"""Other systems' transfer engines over the same memory sizes, each with two processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import NamedTuple

from benchmarks import report
from benchmarks.peers import install
from benchmarks.transfer.pools import POOL_BYTES


class Engine(NamedTuple):
    """The package, and what its processes are told by their environment."""

    package: str
    environment: dict[str, str]


ENGINES = {
    "nixl shm": Engine("nixl", {"UCX_TLS": "shm,tcp"}),
    "nixl tcp": Engine("nixl", {"UCX_TLS": "tcp"}),
    "mooncake tcp": Engine("mooncake", {"MC_TCP_SLICE_SIZE": "1048576"}),
}


class Engines:
    """All that start here; those that do not are named and left out."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[_Child, _Child]] = {}
        for name, engine in ENGINES.items():
            try:
                self._pairs[name] = _start(engine)
            except (RuntimeError, AssertionError) as error:
                print(f"  without {name}: {str(error).strip().splitlines()[-1]}", flush=True)

    def measure(self, run_bytes: int, rounds: int) -> dict[str, list[float]]:
        """GB/s of each engine in each round."""
        print(f"other engines, runs of {run_bytes >> 10} KiB", flush=True)
        sides = {n: partial(p.seconds, run_bytes) for n, (_, p) in self._pairs.items()}
        for side in sides.values():
            side()
        num_bytes = POOL_BYTES // run_bytes * run_bytes
        raw = report.interleave(sides, rounds)
        return {name: [num_bytes / s / 1e9 for s in seconds] for name, seconds in raw.items()}

    def close(self) -> None:
        """End them."""
        for pair in self._pairs.values():
            for child in pair:
                child.close()


class _Child:
    """One process of an engine."""

    def __init__(self, engine: Engine, role: str, *arguments: str) -> None:
        folder = install.transfer_engine(engine.package)
        environment = {**os.environ, **engine.environment, "PYTHONPATH": f"{folder}{os.pathsep}."}
        command = [sys.executable, "-m", "benchmarks.transfer.foreign_child", engine.package, role]
        self._process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def hear(self, key: str) -> str:
        """The rest of the next line that begins with `key`; what else an engine prints is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f"{key} "):
                return line.removeprefix(f"{key} ").strip()
        raise RuntimeError("it does not start here")

    def seconds(self, run_bytes: int) -> float:
        """Of one transfer of the whole memory."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{run_bytes}\n")
        self._process.stdin.flush()
        return float(self.hear("seconds"))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()


def _start(engine: Engine) -> tuple[_Child, _Child]:
    receiver = _Child(engine, "receiver")
    sender = None
    try:
        sender = _Child(engine, "sender", receiver.hear("reach"))
        sender.hear("ready")
    except BaseException:
        for child in filter(None, (receiver, sender)):
            child.close()
        raise
    return receiver, sender
