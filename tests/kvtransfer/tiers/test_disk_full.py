"""A disk tier whose writes fail: its stores fail, and nothing else; the bound holds before and after."""

from __future__ import annotations

from pathlib import Path

from kvtransfer.tiers.base import StorePlan
from kvtransfer.tiers.disk_files import HEADER_BYTES, RECORD_BYTES
from tests.kvtransfer.tiers.harness import (
    BLOCK_BYTES,
    capacity_bytes,
    chain,
    check_all,
    held,
    make_disk,
    store,
    write_all,
)
from tests.support.full_disk import files_limited_to


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def try_store(tier: object, *numbers: int) -> bool:
    """Store a chain as a mover would; whether it was written."""
    plan = tier.prepare_store(chain(*numbers))  # type: ignore[attr-defined]
    assert isinstance(plan, StorePlan)
    try:
        write_all(tier, plan.placements)  # type: ignore[arg-type]
    except OSError:
        tier.complete_store(plan.placements, ok=False)  # type: ignore[attr-defined]
        return False
    tier.complete_store(plan.placements, ok=True)  # type: ignore[attr-defined]
    return True


def test_a_full_disk_fails_stores_and_nothing_else(tmp_path: Path) -> None:
    """Room for two blocks and a half of ten: the third is cut off in the middle."""
    tier = make_disk(tmp_path, 10)
    with files_limited_to(2 * BLOCK_BYTES + BLOCK_BYTES // 2):
        assert try_store(tier, 1)
        assert try_store(tier, 2)
        for number in range(3, 40):
            assert not try_store(tier, number)
            assert size_of(tmp_path) <= capacity_bytes("disk", 10)
        assert tier.counters.failed_blocks_total == 37
        assert tier.counters.evicted_blocks_total == 0, "a failed store costs no block that is held"
        assert check_all(tier, range(40)) == 2
    assert try_store(tier, *range(40, 48)), "when there is room again, stores succeed again"
    assert check_all(tier, range(60)) == 10
    for number in range(60, 100):
        store(tier, number)
    assert size_of(tmp_path) <= capacity_bytes("disk", 10)
    tier.close()
    tier = make_disk(tmp_path, 10)
    assert check_all(tier, range(100)) == 10
    assert tier.counters.damaged_blocks_total == 0
    tier.close()


def test_an_index_that_cannot_be_written_fails_stores_and_nothing_else(tmp_path: Path) -> None:
    tier = make_disk(tmp_path, 10)
    store(tier, 1)
    with files_limited_to(HEADER_BYTES + RECORD_BYTES + 5):
        for number in range(2, 30):
            assert not try_store(tier, number)
        assert held(tier, range(30)) == [1]
    assert try_store(tier, 2, 3)
    tier.close()
    tier = make_disk(tmp_path, 10)
    assert held(tier, range(30)) == [1, 2, 3]
    assert check_all(tier, range(30)) == 3
    tier.close()
