"""A disk tier whose process dies: at every single write, after any number of its bytes, and by kill -9 in full work."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvtransfer.tiers.harness import check_all, held, make_disk, store

NUM_SLOTS = 4
NUMBERS = range(1, 13)


class Died(BaseException):
    """Where the process would have ended."""


class Dying:
    """Stands for os.pwrite: lets some calls through, then writes a part of the next one and dies."""

    def __init__(self, num_calls: int, share: float) -> None:
        self.num_calls = num_calls
        self.share = share
        self.pwrite = os.pwrite

    def __call__(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self.num_calls:
            self.num_calls -= 1
            return self.pwrite(descriptor, data, offset)
        self.pwrite(descriptor, data[: int(len(data) * self.share)], offset)
        raise Died


def work(folder: Path) -> None:
    """Stores that fill the tier and then evict, one of them of two blocks: 3 writes a block, 1 for a new header."""
    tier = make_disk(folder, NUM_SLOTS, policy="arc")
    try:
        for number in NUMBERS:
            store(tier, number, number // 2 + 1)
    finally:
        tier.close()


def num_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    counting = Dying(10**9, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", counting)
        work(folder)
    return 10**9 - counting.num_calls


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0])
def test_death_at_any_write_leaves_only_blocks_that_verify(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = num_writes(tmp_path / "whole", monkeypatch)
    assert total > 40
    most_damaged = 0
    for death in range(total):
        folder = tmp_path / str(death)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", Dying(death, share))
            with pytest.raises(Died):
                work(folder)
        tier = make_disk(folder, NUM_SLOTS, policy="arc")
        damaged = tier.counters.damaged_blocks_total
        assert check_all(tier, range(20)) == len(held(tier, range(20))) == len(tier)
        # What is found after a death was wholly written: the one torn record at most was seen at the start.
        assert tier.counters.damaged_blocks_total == damaged <= 1
        most_damaged = max(most_damaged, damaged)
        tier.close()
    assert most_damaged == (1 if share in (0.3, 0.99) else 0)


WRITER = """
import sys
from pathlib import Path
from tests.kvtransfer.tiers.harness import make_disk, store
tier = make_disk(Path(sys.argv[1]), 24, policy="arc", block_bytes=20_000)
number = int(sys.argv[2])
print("writing", flush=True)
while True:
    store(tier, number % 1000, number * 7 % 1000, number * 13 % 1000)
    number += 1
"""


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """One folder, a writer killed again and again; each time every hit verifies, and nothing is over the bound."""
    draw = random.Random(11)
    num_found = 0
    for life in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(life * 1000)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        pause_s = draw.random() * 0.1
        try:
            writer.wait(pause_s)
        except subprocess.TimeoutExpired:
            pass
        writer.send_signal(signal.SIGKILL)
        writer.stdout.close()
        assert writer.wait(10) == -signal.SIGKILL
        tier = make_disk(tmp_path, 24, policy="arc", block_bytes=20_000)
        damaged = tier.counters.damaged_blocks_total
        found = check_all(tier, range(1000))
        assert found == len(tier)
        assert tier.counters.damaged_blocks_total == damaged <= 1
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 64 + 24 * 20_072
        num_found += found
        tier.close()
    assert num_found >= 8 * 20, "the writers wrote nothing to lose"
