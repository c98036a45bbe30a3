"""Random histories of an engine with tiers: prefixes shared and lost, clients gone, blocks damaged, tiers slow or full.

`--schedules 1000` runs so many, `--first-schedule 47 --schedules 1` the one that a failure names. Tiers have threads,
so a seed fixes what is done to the engine, not when a block comes back.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.block_hash import DEFAULT_HASH_BLOCK_SIZE
from core.request import Request
from engine.messages import AddRequest, ResetPrefixCache
from engine.offload_config import OffloadConfig
from kvtransfer.tiers.base import Placement, Tier
from tests.support.engines import EngineHarness, abort, make_request, turn_until
from tests.support.ledger_model import VOCAB_SIZE, ledger_answer
from tests.support.memory_store import MemoryServer, MemoryStore

NUM_REQUESTS = 24
MIB = 1 / 1024


class Weather:
    """Makes a tier's reads and writes fail, lie or take their time, by chance."""

    def __init__(self, tier: Tier, seed: int) -> None:
        self._chance = random.Random(seed)
        self._read, self._write = tier.read, tier.write
        self.level = 0.0
        tier.read, tier.write = self.read, self.write  # type: ignore[method-assign]

    def read(self, placement: Placement, block: memoryview) -> bool:
        self._dawdle()
        if self._chance.random() < 0.2 * self.level:
            block[:] = bytes(len(block))
            return False
        if self._chance.random() < 0.05 * self.level:
            raise OSError(5, "Input/output error")
        return self._read(placement, block)

    def write(self, placement: Placement, block: memoryview) -> None:
        self._dawdle()
        if self._chance.random() < 0.1 * self.level:
            raise OSError(28, "No space left on device")
        self._write(placement, block)

    def _dawdle(self) -> None:
        if self._chance.random() < 0.2 * self.level:
            time.sleep(0.002)


def config_of(chance: random.Random, folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = {
        "policy": chance.choice(["arc", "lru"]),
        "store": chance.choice(["eager", "lazy"]),
        "store_threshold": chance.choice([0, 0, 2]),
    }
    disk = {
        "disk_dir": str(folder),
        "disk_threshold": chance.choice([0, 2]),
        "disk_size": chance.choice([0.01, 0.1]) * MIB,
    }
    kinds = chance.choice([{"host"}, {"disk"}, {"host", "disk"}, {"remote"}, {"host", "remote"}])
    if "host" in kinds:
        values["size"] = chance.choice([0.008, 0.1]) * MIB
    if "disk" in kinds:
        values |= disk
    if "remote" in kinds:
        values |= {"remote_url": "redis://anywhere:1", "remote_size": 0.05 * MIB}
    return values


def make_requests(chance: random.Random) -> list[Request]:
    """A tree of prompts: some are the beginnings of others."""
    prompts: list[list[int]] = [[chance.randrange(VOCAB_SIZE) for _ in range(20)]]
    requests = []
    for number in range(NUM_REQUESTS):
        stem = chance.choice(prompts)
        cut = chance.randrange(len(stem) + 1)
        prompt = [*stem[:cut], *(chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(60)))]
        prompt = prompt[:150] or [1]
        prompts.append(prompt)
        max_tokens, n = chance.randrange(1, 20), chance.choice([1, 1, 1, 3])
        request = make_request(f"r{number}", prompt, max_tokens=max_tokens, n=n)
        requests.append(replace(request, priority=chance.randrange(3)))
    return requests


def run_schedule(seed: int, server: MemoryServer) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        harness = EngineHarness(
            num_blocks=chance.choice([12, 20, 40]),
            block_size=chance.choice([1, 2]) * DEFAULT_HASH_BLOCK_SIZE,
            is_ledger=True,
            is_staged=chance.random() < 0.3,
            scheduling_policy=chance.choice(["fcfs", "priority"]),
            offload=OffloadConfig(**config_of(chance, Path(folder))),
        )
        try:
            _run(harness, chance, seed, server)
        finally:
            harness.close()


def _run(harness: EngineHarness, chance: random.Random, seed: int, server: MemoryServer) -> None:
    weathers = [Weather(harness.tiers.tier(name), seed) for name in harness.tiers.names]
    left = make_requests(chance)
    open_requests: list[Request] = []
    given_up: set[str] = set()
    finished: list[Request] = []
    for _ in range(100_000):
        if not left and not open_requests:
            break
        if left and chance.random() < 0.2:
            request = left.pop()
            harness.inbox.post(AddRequest(request))
            open_requests.append(request)
        if open_requests and chance.random() < 0.01:
            gone = chance.choice(open_requests)
            given_up.add(gone.id)
            abort(harness, gone.id)
        if chance.random() < 0.02:
            for weather in weathers:
                weather.level = chance.choice([0.0, 0.0, 0.5, 1.0])
        if chance.random() < 0.005:
            harness.inbox.post(ResetPrefixCache())
        if chance.random() < 0.01:
            server.is_up = chance.random() < 0.7
        if chance.random() < 0.005:
            server.values.clear()
        if chance.random() < 0.1:
            cost = chance.choice([1e-6, 1e-3, 1.0])
            harness.core._offload.loads._compute_s_a_token = cost
        harness.turn(0.0005)
        ended = [r for r in open_requests if len(harness.finish_reasons(r.id)) == r.sampling.n]
        for request in ended:
            open_requests.remove(request)
            finished.append(request)
    assert not open_requests, f"schedule {seed}: {[r.id for r in open_requests]} never end"
    turn_until(harness.is_idle, harness)
    for request in finished:
        if request.id not in given_up:
            answer = [harness.tokens(request.id, choice) for choice in range(request.sampling.n)]
            assert answer == ledger_answer(request), f"schedule {seed}: {request.id}"
    for name in harness.tiers.names:
        tier = harness.tiers.tier(name)
        assert len(tier) <= tier.num_slots
        assert tier.num_pinned == 0  # type: ignore[attr-defined]


def test_every_history_ends_right_and_at_rest(
    schedule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MemoryServer()
    monkeypatch.setattr("kvtransfer.tiers.remote.open.open_store", lambda url: MemoryStore(server))
    run_schedule(schedule, server)
