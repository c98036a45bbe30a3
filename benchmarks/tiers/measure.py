"""One engine for each place where KV may lie, asked in turn."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.assembly import assemble
from engine.channel import Inbox
from engine.config import EngineConfig
from engine.messages import AddRequest, EngineReady, StepDone, ToFront
from engine.offload_config import OffloadConfig
from engine.stats import EngineStats
from kvtransfer.tiers.disk_files import leave_memory
from tests.support.oracle import demo_model_path

HOST_FACTOR = 1.15
SLOW_FACTOR = 1.1
SLOWNESS = 4.0
STEP_TOKENS = 512
"""As many in every engine, whatever each would have measured for itself: chunks weigh more than what is compared."""

_CHUNK_BYTES = 1 << 20
_SWITCH_INTERVAL_S = 0.0005
"""As an engine process has it: threads that move blocks do not keep the engine's waiting."""


class Worker:
    """An engine whose pool holds one prompt, with the tiers that `offload` names."""

    def __init__(self, num_tokens: int, num_threads: int, **offload: Any) -> None:
        self._inbox = Inbox()
        self._first_at: dict[str, float] = {}
        self._num_asked = 0
        self.stats = EngineStats()
        config = EngineConfig(
            model=str(demo_model_path()),
            device="cpu",
            num_threads=num_threads,
            core_ledger="none",
            ipc_dir="none",
            max_model_len=num_tokens + 64,
            max_num_batched_tokens=STEP_TOKENS,
            num_blocks=-(-(num_tokens + 64) // 16) + 8,
            offload=OffloadConfig(**offload),
        )
        self._core = assemble(config, self._inbox, self._hear)

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds from the request to its first token; the engine is at rest before and afterwards."""
        self.rest()
        self._num_asked += 1
        name = f"r{self._num_asked}"
        params = SamplingParams(seed=0, temperature=0.0, max_tokens=1, ignore_eos=True)
        request = Request(RequestId(name), "bench", tuple(prompt), params)
        started = time.perf_counter()
        self._inbox.post(AddRequest(request))
        stepped = True
        while (
            name not in self._first_at
        ):  # as the engine's own loop: it waits for messages only with nothing to run
            stepped = self._core.turn(0.0 if stepped else 0.05)
        taken = self._first_at.pop(name) - started
        self.rest()
        return taken

    def rest(self) -> None:
        """Until nothing is on its way to or from a tier."""
        while self._core.turn(0.02) or not self._core._is_idle:
            pass

    def close(self) -> None:
        """Let go of everything."""
        self._core.close()

    def _hear(self, message: ToFront) -> None:
        if isinstance(message, EngineReady):
            self.block_bytes = message.layout.block_bytes
        if isinstance(message, StepDone):
            self.stats = message.stats
            for output in message.outputs:
                if output.token_ids:
                    self._first_at.setdefault(output.request_id, time.perf_counter())


def run(rounds: int, num_tokens: int, num_threads: int) -> dict[str, Any]:
    """All sides, in turn; prints tables, returns medians, goals and raw rounds."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd())))

        def start(**offload: Any) -> Worker:
            worker = Worker(num_tokens, num_threads, **offload)
            stack.callback(worker.close)
            return worker

        plain = start()
        prompts = _Prompts(num_tokens)
        computed_s = plain.first_token_s(prompts.new())
        num_bytes = (num_tokens - 1) // 16 * plain.block_bytes
        disk = {"disk_dir": str(folder / "kv"), "disk_size": 0.5, "disk_threshold": 0}
        slow_rate = num_bytes / (SLOWNESS * computed_s)
        workers = {
            "host": start(size=0.5),
            "disk": start(**disk),
            "slow": start(size=0.5, load_rate=slow_rate),
        }
        raw_new: list[float] = []
        for _ in range(min(3, rounds)):
            fresh = Worker(num_tokens, num_threads, size=0.5, load_rate=slow_rate)
            level = fresh._core._offload._connector._levels["host"]  # type: ignore[index]
            level.rate.bytes_per_s = 4e9  # what a worker takes for true that has not read yet
            raw_new.append(_reread(fresh, prompts))
            fresh.close()
        gc.collect()
        gc.freeze()
        for _ in range(2):  # rates and pages are known before it counts
            for worker in workers.values():
                _reread(worker, prompts)
        sides: dict[str, Callable[[], float]] = {
            "device": lambda: _from_pool(plain, prompts),
            "host": lambda: _reread(workers["host"], prompts),
            "disk": lambda: _reread(workers["disk"], prompts, folder / "kv"),
            # The same engine: two that differ in nothing differ by a tenth in where their memory lies.
            "computed": lambda: workers["slow"].first_token_s(prompts.new()),
            "slow": lambda: _reread(workers["slow"], prompts),
            "memcpy": lambda: _copy_s(num_bytes, plain.block_bytes),
            "file": lambda: _read_s(folder / "plain", num_bytes),
        }
        raw = report.interleave(sides, rounds) | {"slow, new": raw_new}
        loaded = {name: worker.stats.tiers[0] for name, worker in workers.items()}
        assert loaded["host"].loaded_blocks_total >= rounds * (num_tokens // 16 - 1), "no host hits"
        assert loaded["disk"].loaded_blocks_total >= rounds * (num_tokens // 16 - 1), "no disk hits"
    return _state(raw, num_bytes, num_tokens)


def _state(raw: dict[str, list[float]], num_bytes: int, num_tokens: int) -> dict[str, Any]:
    seconds = report.medians(raw)
    allowed = {
        "host": HOST_FACTOR * (seconds["device"] + 2 * seconds["memcpy"]),
        "disk": seconds["device"] + 2 * seconds["file"],
        "slow": SLOW_FACTOR * seconds["computed"],
        "slow, new": SLOW_FACTOR * seconds["computed"],
    }
    ratios = {name: seconds[name] / limit for name, limit in allowed.items()}
    speedups = {name: seconds["computed"] / seconds[name] for name in ("device", "host", "disk")}
    rows = [
        (name, 1e3 * value, 1e3 * allowed[name] if name in allowed else "", ratios.get(name, ""))
        for name, value in seconds.items()
    ]
    title = f"first token of {num_tokens} tokens, {num_bytes / 1e6:.1f} MB of KV"
    report.print_table(title, ("where", "ms", "goal, ms", "of the goal"), rows)
    return {
        "num_tokens": num_tokens,
        "kv_bytes": num_bytes,
        "median_s": seconds,
        "goal_s": allowed,
        "of_goal": ratios,
        "times_faster_than_computed": speedups,
        "raw_s": raw,
    }


class _Prompts:
    """Prompts that nobody has seen."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._chance = random.Random(1)

    def new(self) -> list[int]:
        return [self._chance.randrange(100, 40_000) for _ in range(self._num_tokens)]


def _from_pool(worker: Worker, prompts: _Prompts) -> float:
    prompt = prompts.new()
    worker.first_token_s(prompt)
    return worker.first_token_s(prompt)


def _reread(worker: Worker, prompts: _Prompts, folder: Path | None = None) -> float:
    """A prompt is computed and stored, another one takes its place in the pool, then it comes again."""
    prompt = prompts.new()
    worker.first_token_s(prompt)
    worker.first_token_s(prompts.new())
    if folder is not None:
        for file in folder.glob("*/blocks"):
            leave_memory(file)
    return worker.first_token_s(prompt)


def _copy_s(num_bytes: int, block_bytes: int) -> float:
    """Seconds that one thread takes to copy so many bytes, block by block, from memory it has not just used."""
    num_blocks = num_bytes // block_bytes
    source = np.full((num_blocks, block_bytes), 1, np.uint8)
    target = np.full((num_blocks, block_bytes), 2, np.uint8)
    started = time.perf_counter()
    for index in range(num_blocks):
        target[index] = source[index]
    return time.perf_counter() - started


def _read_s(path: Path, num_bytes: int) -> float:
    """Seconds to read a plain file of so many bytes of which no page is in memory."""
    if not path.exists():
        path.write_bytes(os.urandom(num_bytes))
    leave_memory(path)
    buffer = bytearray(_CHUNK_BYTES)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - started
