"""D's side: runs every side in turn and times it."""

from __future__ import annotations

import ctypes
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks import report
from benchmarks.transfer import foreign, pulls
from benchmarks.transfer.pools import (
    BLOCK_SIZE,
    POOL_BYTES,
    layout_of,
    num_blocks_of,
    settle,
)
from core.blocks import BlockLife
from core.ids import BlockId, SessionId
from kvtransfer.config import TransferConfig
from kvtransfer.events import MoverEvent, SessionComplete
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.session import Destination, ReceiveSession
from kvtransfer.transports.base import Receiver
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.pull.receiver import PullReceiver
from kvtransfer.transports.shm.receiver import ShmReceiver
from kvtransfer.transports.tcp.receiver import TcpReceiver

RUN_BYTES = (24 << 10, 256 << 10, 1 << 20, 4 << 20)


class Child:
    """P's process."""

    def __init__(self, engines: Sequence[str]) -> None:
        """engines: those that it reads by as well."""
        self.engines = engines
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer.child"], env=pulls.environment(engines),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, line: str) -> None:
        """Say something that will be answered."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self, answer: str) -> None:
        """Wait for this answer."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        assert said == answer, f"P says {said!r}, not {answer!r}"

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Decode:
    """D: a pool and its receivers."""

    def __init__(self, run_bytes: int, ipc_dir: str, engines: Sequence[str]) -> None:
        self.layout = layout_of(run_bytes)
        self._num_blocks = num_blocks_of(run_bytes)
        self.memory = PoolMemory(self._num_blocks, run_bytes)
        self._life = BlockLife(self._num_blocks)
        self._blocks = [BlockId(block) for block in range(1, self._num_blocks)]
        self._is_complete = threading.Event()
        config = TransferConfig(ipc_dir=ipc_dir)
        intake = Intake(self._life, self.memory.buffer, self.layout, self._hear)
        self.receivers: dict[str, Receiver] = {
            "shm": ShmReceiver(intake, config),
            "tcp": TcpReceiver(intake, config),
        }
        for kind in engines:
            engine = pulls.engine(kind, is_read=False)
            self.receivers[kind] = PullReceiver(kind, engine, intake, config)
        self._intake = intake

    def seconds(self, child: Child, kind: str) -> float:
        """From P's push to D's completion, of all blocks."""
        session, secret = SessionId(secrets.randbits(63)), secrets.token_bytes(32)
        for block in self._blocks:
            self._life.allocate(block)
        permit = self._life.grant(session, 0, self._blocks)
        destinations = tuple(
            Destination(position, block, BLOCK_SIZE) for position, block in enumerate(self._blocks)
        )
        self._intake.expect(ReceiveSession(session, 0, secret, permit, (destinations,)))
        self._is_complete.clear()
        address = self.receivers[kind].addresses[0]
        started = time.perf_counter()
        child.tell(f"push {kind} {address} {session} {secret.hex()}")
        self._is_complete.wait()
        seconds = time.perf_counter() - started
        child.hear("sent")
        self._intake.forget(session, 0)
        self._life.revoke(permit)
        for block in self._blocks:
            self._life.abort(block)
        return seconds

    def close(self) -> None:
        """Give all back."""
        for receiver in self.receivers.values():
            receiver.close()
        self.memory.close()

    def _hear(self, event: MoverEvent) -> None:
        if isinstance(event, SessionComplete):
            self._is_complete.set()


def run(rounds: int) -> dict[str, Any]:
    """Every run size; prints a table and returns medians, ratios and raw rounds."""
    settle()
    raw: dict[str, dict[str, list[float]]] = {}
    child = Child(pulls.find())
    try:
        for run_bytes in RUN_BYTES:
            print(f"runs of {run_bytes >> 10} KiB", flush=True)
            raw[str(run_bytes)] = _measure(child, run_bytes, rounds)
    finally:
        child.close()
    others = foreign.Engines()
    try:
        for run_bytes in RUN_BYTES:
            raw[str(run_bytes)] |= others.measure(run_bytes, rounds)
    finally:
        others.close()
    medians = {size: report.medians(sides) for size, sides in raw.items()}
    ratios = {size: _ratios(sides) for size, sides in medians.items()}
    for title, tables in (("GB/s", medians), ("ratios", ratios)):
        names = list(next(iter(tables.values())))
        rows = [(name, *(tables[size][name] for size in tables)) for name in names]
        header = ("side", *(f"{int(size) >> 10} KiB" for size in tables))
        report.print_table(title, header, rows)
    return {"pool_bytes": POOL_BYTES, "gb_per_s": medians, "ratios": ratios, "rounds": raw}


def _measure(child: Child, run_bytes: int, rounds: int) -> dict[str, list[float]]:
    num_bytes = POOL_BYTES // run_bytes * run_bytes
    with _pools(child, run_bytes, is_checked=False) as decode:
        sides: dict[str, Callable[[], float]] = {
            "memcpy": _memcpy_of(decode.memory, run_bytes),
            "raw socket": partial(_plain_seconds, child, decode.memory, run_bytes),
            "tcp": partial(decode.seconds, child, "tcp"),
            "shm": partial(decode.seconds, child, "shm"),
        } | {f"over {kind}": partial(decode.seconds, child, kind) for kind in child.engines}
        for side in sides.values():
            side()
        seconds = report.interleave(sides, rounds)
        _check(decode.memory, run_bytes)
    with _pools(child, run_bytes, is_checked=True) as decode:
        checked = partial(decode.seconds, child, "shm")
        checked()
        seconds |= report.interleave({"shm checked": checked}, rounds)
    return {name: [num_bytes / s / 1e9 for s in values] for name, values in seconds.items()}


@contextmanager
def _pools(child: Child, run_bytes: int, *, is_checked: bool) -> Iterator[Decode]:
    child.tell(" ".join(["pool", str(run_bytes), str(int(is_checked)), *child.engines]))
    child.hear("made")
    with tempfile.TemporaryDirectory() as folder:
        decode = Decode(run_bytes, folder, child.engines)
        try:
            yield decode
        finally:
            decode.close()
            child.tell("drop")
            child.hear("dropped")


def _memcpy_of(destination: PoolMemory, run_bytes: int) -> Callable[[], float]:
    """Run by run with one thread, from another pool that is there already."""
    source = PoolMemory(num_blocks_of(run_bytes), run_bytes)
    source.buffer[:] = bytes(len(source.buffer))

    def seconds() -> float:
        to, start = _address(destination), _address(source)
        started = time.perf_counter()
        for offset in range(0, POOL_BYTES // run_bytes * run_bytes, run_bytes):
            ctypes.memmove(to + offset, start + offset, run_bytes)
        return time.perf_counter() - started

    return seconds


def _address(memory: PoolMemory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory.mapping, memory.header_bytes))


def _plain_seconds(child: Child, destination: PoolMemory, run_bytes: int) -> float:
    num_bytes = POOL_BYTES // run_bytes * run_bytes
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child.tell(f"socket {listener.getsockname()[1]} {run_bytes}")
        peer, _ = listener.accept()
        with peer:
            peer.recv(1, socket.MSG_PEEK)
            started, taken = time.perf_counter(), 0
            while taken < num_bytes:
                end = min(taken + run_bytes - taken % run_bytes, num_bytes)
                taken += peer.recv_into(destination.buffer[taken:end])
            seconds = time.perf_counter() - started
    child.hear("sent")
    return seconds


def _check(memory: PoolMemory, run_bytes: int) -> None:
    for block in range(1, num_blocks_of(run_bytes)):
        place = memory.buffer[block * run_bytes : (block + 1) * run_bytes]
        assert place == bytes([block % 251]) * run_bytes, f"block {block} is not P's"


def _ratios(sides: dict[str, float]) -> dict[str, float]:
    ratios = {
        "shm / memcpy": sides["shm"] / sides["memcpy"],
        "shm checked / memcpy": sides["shm checked"] / sides["memcpy"],
        "tcp / raw socket": sides["tcp"] / sides["raw socket"],
    }
    for kind in pulls.KINDS:
        if (name := f"over {kind}") in sides:
            ratios[f"{name} / tcp"] = sides[name] / sides["tcp"]
    for name in sides.keys() & foreign.ENGINES.keys():
        own = "shm" if "shm" in name else "tcp"
        ratios[f"{own} / {name}"] = sides[own] / sides[name]
    return ratios
