"""Cases from public reports of other servers about tiers, between a real engine and its tiers."""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from core.request import Request
from engine.messages import AddRequest
from engine.offload_config import OffloadConfig
from engine.stats import TierStats
from kvtransfer.tiers.base import BlockKey
from tests.support.engines import BLOCK_SIZE, EngineHarness, make_request, turn_until
from tests.support.full_disk import files_limited_to
from tests.support.ledger_model import VOCAB_SIZE, ledger_answer

MIB = 1 / 1024
BLOCK_BYTES = 768
"""Of the ledger model: three layers, K and V, sixteen slots of two floats."""


@contextmanager
def engine(num_blocks: int = 12, **offload: Any) -> Iterator[EngineHarness]:
    harness = EngineHarness(num_blocks=num_blocks, is_ledger=True, offload=OffloadConfig(**offload))
    assert harness.layout.block_bytes == BLOCK_BYTES
    try:
        yield harness
    finally:
        harness.close()


class Asker:
    """Sends prompts of whole blocks, and holds every answer to what a cold engine says."""

    def __init__(self, harness: EngineHarness) -> None:
        self._harness = harness
        self._num_asked = 0

    def request(self, *blocks: int) -> Request:
        """A prompt of these blocks and one token more, so that each of them may be found."""
        self._num_asked += 1
        tokens = [token for block in blocks for token in words(block)]
        return make_request(f"r{self._num_asked}", [*tokens, 1], max_tokens=2)

    def ask(self, *prompts: tuple[int, ...]) -> list[int]:
        """All at once; how many blocks of each were found."""
        requests = [self.request(*blocks) for blocks in prompts]
        for request in requests:
            self._harness.inbox.post(AddRequest(request))
        harness = self._harness
        turn_until(lambda: all(harness.finish_reasons(r.id) for r in requests), harness)
        turn_until(harness.is_idle, harness)
        found = []
        for request in requests:
            assert [harness.tokens(request.id)] == ledger_answer(request)
            outputs = harness.outputs.pop(request.id)
            (cached,) = [o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None]
            found.append(cached // BLOCK_SIZE)
        return found

    @property
    def stats(self) -> TierStats:
        """The tier's figures."""
        return self._harness.stats.tiers[0]

    def holds(self, *blocks: int) -> bool:
        """Whether the tier has a whole prompt."""
        harness = self._harness
        (sequence,) = [*_sequences(self.request(*blocks))]
        harness.scheduler.kv.attach(sequence)
        keys = [BlockKey(content.key) for content in harness.scheduler.kv.contents(sequence)]
        return harness.tiers.tier(harness.tiers.names[0]).lookup(keys) == len(keys)

    def lose_pool(self) -> None:
        """What the pool has cached is gone; the tier keeps what it has."""
        self._harness.pool.reset_prefix_cache()


def _sequences(request: Request) -> Iterator[Any]:
    from engine.sequence import start_sequences

    yield from start_sequences(request)


def words(block: int) -> list[int]:
    chance = random.Random(block)
    return [chance.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE)]


def host_bytes(num_blocks: int) -> float:
    """GiB of a host tier of so many blocks and no byte more."""
    return (4096 + num_blocks * BLOCK_BYTES) / 2**30


@pytest.mark.public_case("B32")
@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("num_slots", [4, 8])
def test_a_small_tier_never_loses_what_it_was_just_given(policy: str, num_slots: int) -> None:
    with engine(size=host_bytes(num_slots), policy=policy) as harness:
        asker = Asker(harness)
        asker.ask((1, 2, 3, 4))
        assert asker.stats.capacity_blocks == num_slots
        asker.ask((1, 5, 6, 7))
        asker.lose_pool()
        assert asker.holds(1)
        assert asker.ask((1, 5, 6, 7))[0] >= 1
        chance = random.Random(num_slots)
        prefixes = [tuple(range(100 * n, 100 * n + chance.randrange(1, 4))) for n in range(1, 13)]
        sizes = []
        for number in range(200):
            some = [
                prefixes[0] if chance.random() < 0.5 else chance.choice(prefixes) for _ in range(3)
            ]
            asker.ask(*some)
            assert asker.stats.num_blocks <= num_slots
            assert (
                sum(asker.stats.policy[name] for name in ("b1", "b2") if policy == "arc")
                <= num_slots
            )
            if number in (99, 199):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0)
                if not tracemalloc.is_tracing():
                    tracemalloc.start()
        tracemalloc.stop()
        assert sizes[1] < 200_000  # what a hundred rounds have added, and the measuring itself
        assert asker.stats.refused_stores_total == 0
        assert asker.stats.failed_blocks_total == 0
        for number in range(100):
            asker.ask((10_000 + number,))
        asker.lose_pool()
        asker.ask(prefixes[0])
        asker.lose_pool()
        assert asker.ask(prefixes[0]) == [len(prefixes[0])]


@pytest.mark.public_case("B35")
def test_a_full_disk_is_a_miss_and_hits_return_with_room(tmp_path: Path) -> None:
    with engine(disk_dir=str(tmp_path), disk_size=1 * MIB, disk_threshold=0) as harness:
        asker = Asker(harness)
        with files_limited_to(0):
            assert asker.ask((1, 2, 3)) == [0]
            asker.lose_pool()
            assert asker.ask((1, 2, 3)) == [0]
        assert asker.stats.failed_blocks_total > 0
        assert asker.stats.num_blocks == 0
        asker.lose_pool()
        assert asker.ask((1, 2, 3)) == [0]
        asker.lose_pool()
        assert asker.ask((1, 2, 3)) == [3]


@pytest.mark.public_case("B35")
@pytest.mark.failure_edge("tier read fails or is corrupt")
@pytest.mark.parametrize("blocks_left", [0, 1, 2])
def test_a_file_cut_short_is_a_miss_from_there_on(blocks_left: int, tmp_path: Path) -> None:
    with engine(disk_dir=str(tmp_path), disk_size=1 * MIB, disk_threshold=0) as harness:
        asker = Asker(harness)
        asker.ask((1, 2, 3))
        asker.lose_pool()
        os.truncate(tmp_path / "worker-0" / "blocks", blocks_left * BLOCK_BYTES + 100)
        assert asker.ask((1, 2, 3)) == [blocks_left]
        assert asker.stats.damaged_blocks_total == 3 - blocks_left
        asker.lose_pool()
        assert asker.ask((1, 2, 3)) == [3]  # computed again, and stored again


@pytest.mark.public_case("B35")
@pytest.mark.failure_edge("tier read fails or is corrupt")
def test_a_folder_that_is_taken_away_harms_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with engine(disk_dir=str(folder), disk_size=1 * MIB, disk_threshold=0) as harness:
        asker = Asker(harness)
        asker.ask((1, 2, 3))
        for file in (folder / "worker-0").iterdir():
            file.unlink()
        asker.lose_pool()
        assert asker.ask((1, 2, 3)) == [3]  # the files live on as long as they are open
    with engine(disk_dir=str(folder), disk_size=1 * MIB, disk_threshold=0) as harness:
        assert Asker(harness).ask((1, 2, 3)) == [0]
