"""The disk tier: what is believed after a restart, what is a miss, and what is worth a write."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from core.block_hash import HashRoot
from core.errors import ConfigError
from core.kv_identity import GroupShape, KVIdentity
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from kvtransfer.tiers.base import StorePlan
from kvtransfer.tiers.disk import DiskConfig
from kvtransfer.tiers.disk_files import HEADER_BYTES, RECORD_BYTES, _runs
from kvtransfer.tiers.fingerprint import fingerprint
from tests.kvtransfer.tiers.harness import (
    BLOCK_BYTES,
    capacity_bytes,
    chain,
    check_all,
    content,
    held,
    key,
    load,
    make_disk,
    store,
    write_all,
)


def flip(path: Path, byte: int, mask: int = 1) -> None:
    """Change bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ mask]))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def damaged_and_foreign(tier: object) -> tuple[int, int]:
    counters = tier.counters  # type: ignore[attr-defined]
    return counters.damaged_blocks_total, counters.foreign_blocks_total


# ---- restarts


def test_a_restart_finds_every_block_with_its_group(tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    store(tier, 1, 2)
    plan = tier.prepare_store([key(1, group=3)])
    assert plan is not None
    write_all(tier, plan.placements)
    tier.complete_store(plan.placements, ok=True)
    tier.close()
    tier = make_disk(tmp_path)
    assert load(tier, [*chain(2, 1), key(1, group=3)]) == [
        content(key(2)), content(key(1)), content(key(1, group=3)),
    ]  # fmt: skip
    assert tier.take_changes() == []
    assert damaged_and_foreign(tier) == (0, 0)
    tier.close()


def test_what_came_last_leaves_last_after_a_restart(tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    store(tier, 1, 2)
    tier.close()
    tier = make_disk(tmp_path)
    store(tier, 3, 4)
    tier.close()
    tier = make_disk(tmp_path)
    assert store(tier, 5, 6, 7).evicted == tuple(chain(2, 1, 4))
    tier.close()
    assert held(make_disk(tmp_path), range(10)) == [3, 5, 6, 7]


def test_slots_that_were_free_are_used_after_a_restart(tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    store(tier, 1, 2, 3)
    placements = tier.prepare_load(chain(2))
    assert placements is not None
    tier.complete_load(placements, placements)  # dropped: the slot in the middle is free
    tier.close()
    tier = make_disk(tmp_path)
    assert held(tier, range(5)) == [1, 3]
    plan = store(tier, 5, 6)
    assert plan.evicted == ()
    assert {placement.slot for placement in plan.placements} == {1, 3}
    assert check_all(tier, range(10)) == 4
    tier.close()


def test_of_two_records_of_a_key_the_newer_counts(tmp_path: Path) -> None:
    """A slot that an evicted block has left bears its record until another block is written there."""
    tier = make_disk(tmp_path, 2)
    store(tier, 1)
    store(tier, 2)
    plan = tier.prepare_store(chain(3))  # 1 leaves, and nothing is written in its place
    assert plan is not None
    assert store(tier, 1).evicted == (key(2),)
    tier.close()
    flip(tmp_path / "blocks", plan.placements[0].slot * BLOCK_BYTES)
    tier = make_disk(tmp_path, 2)
    assert (held(tier, range(5)), len(tier)) == ([1], 1)
    assert check_all(tier, range(5)) == 1
    tier.close()


def test_a_store_that_was_given_up_is_not_found_after_a_restart(tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    plan = tier.prepare_store(chain(1))
    assert plan is not None
    write_all(tier, plan.placements)
    tier.complete_store(plan.placements, ok=False)
    tier.close()
    assert held(make_disk(tmp_path), range(5)) == []


def test_what_was_cleared_is_not_found_after_a_restart(tmp_path: Path) -> None:
    tier = make_disk(tmp_path, 2)
    store(tier, 1, 2)
    store(tier, 3)
    tier.clear()
    store(tier, 4)
    tier.close()
    assert held(make_disk(tmp_path, 2), range(5)) == [4]


def test_a_smaller_tier_keeps_what_fits_and_a_larger_one_all(tmp_path: Path) -> None:
    tier = make_disk(tmp_path, 4)
    store(tier, 1, 2, 3, 4)
    tier.close()
    tier = make_disk(tmp_path, 2)
    assert held(tier, range(6)) == [1, 2]
    assert size_of(tmp_path) <= capacity_bytes("disk", 2)
    assert check_all(tier, range(6)) == 2
    tier.close()
    tier = make_disk(tmp_path, 6)
    assert check_all(tier, range(6)) == 2
    assert store(tier, 5, 6, 7, 8).evicted == ()
    assert check_all(tier, range(10)) == 6
    tier.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    with pytest.raises(ConfigError, match="is in use by another process"):
        make_disk(tmp_path)
    tier.close()
    make_disk(tmp_path).close()


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk tier: .*file cannot be used"):
        make_disk(tmp_path / "file")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "index").symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be used"):
        make_disk(tmp_path / "linked")
    assert (tmp_path / "file").read_bytes() == b""


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    tier = make_disk(tmp_path / "new" / "folder")
    modes = [path.stat().st_mode & 0o777 for path in sorted((tmp_path / "new").rglob("*"))]
    assert modes == [0o700, 0o600, 0o600]
    tier.close()


# ---- damage


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("byte", [0, 517, BLOCK_BYTES - 1])
def test_a_flipped_bit_of_a_block_is_a_miss(byte: int, restarts: bool, tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    plan = store(tier, 1, 2)
    flip(tmp_path / "blocks", plan.placements[1].slot * BLOCK_BYTES + byte, 0x10)
    if restarts:
        tier.close()
        tier = make_disk(tmp_path)
    assert load(tier, chain(1, 2)) == [content(key(1)), None]
    assert held(tier, [1, 2]) == [1]
    assert damaged_and_foreign(tier) == (1, 0)
    tier.close()
    tier = make_disk(tmp_path)
    assert held(tier, [1, 2]) == [1], "dropped for good"
    assert damaged_and_foreign(tier) == (0, 0)
    tier.close()


def test_a_flipped_bit_anywhere_in_a_record_is_a_miss(tmp_path: Path) -> None:
    for byte in range(RECORD_BYTES):
        folder = tmp_path / str(byte)
        tier = make_disk(folder)
        store(tier, 1, 2)
        tier.close()
        flip(folder / "index", HEADER_BYTES + RECORD_BYTES + byte)
        tier = make_disk(folder)
        assert held(tier, range(5)) == [1]
        assert damaged_and_foreign(tier) == (1, 0)
        assert check_all(tier, range(5)) == 1
        tier.close()


def test_a_flipped_bit_in_the_header_empties_the_tier(tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    store(tier, 1, 2)
    tier.close()
    flip(tmp_path / "index", 3)
    tier = make_disk(tmp_path)
    assert (held(tier, range(5)), damaged_and_foreign(tier)) == ([], (1, 0))
    store(tier, 1)
    tier.close()
    assert held(make_disk(tmp_path), range(5)) == [1]


def test_a_record_in_another_slot_is_damage(tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    store(tier, 1, 2)
    tier.close()
    index = bytearray((tmp_path / "index").read_bytes())
    first, second = HEADER_BYTES, HEADER_BYTES + RECORD_BYTES
    index[second : second + RECORD_BYTES] = index[first:second]
    (tmp_path / "index").write_bytes(index)
    tier = make_disk(tmp_path)
    assert (held(tier, range(5)), damaged_and_foreign(tier)) == ([1], (1, 0))
    tier.close()


@pytest.mark.parametrize("restarts", [True, False])
def test_files_cut_short_are_misses_and_the_tier_goes_on(restarts: bool, tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    store(tier, 1, 2, 3)
    os.truncate(tmp_path / "blocks", BLOCK_BYTES + 10)
    if restarts:
        tier.close()
        tier = make_disk(tmp_path)
    else:
        assert load(tier, chain(1, 2, 3)) == [content(key(1)), None, None]
    assert held(tier, range(5)) == [1]
    assert damaged_and_foreign(tier) == (2, 0)
    store(tier, 2, 3, 4)
    assert check_all(tier, range(6)) == 4
    tier.close()


def test_two_blocks_that_changed_places_are_misses(tmp_path: Path) -> None:
    """Each is whole, but neither is what its key names."""
    tier = make_disk(tmp_path)
    store(tier, 1, 2)
    blocks = (tmp_path / "blocks").read_bytes()
    (tmp_path / "blocks").write_bytes(blocks[BLOCK_BYTES:] + blocks[:BLOCK_BYTES])
    assert load(tier, chain(1, 2)) == [None, None]
    tier.close()


# ---- other KV


def test_blocks_of_other_kv_are_dropped_and_counted(tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    store(tier, 1, 2)
    tier.close()
    tier = make_disk(tmp_path, fingerprint=b"of another model")
    assert (held(tier, range(5)), damaged_and_foreign(tier)) == ([], (0, 2))
    store(tier, 3)
    tier.close()
    tier = make_disk(tmp_path)
    assert (held(tier, range(5)), damaged_and_foreign(tier)) == ([], (0, 1))
    tier.close()


def test_blocks_of_another_size_are_dropped_and_counted(tmp_path: Path) -> None:
    tier = make_disk(tmp_path)
    store(tier, 1, 2)
    tier.close()
    tier = make_disk(tmp_path, block_bytes=2 * BLOCK_BYTES)
    assert (held(tier, range(5)), damaged_and_foreign(tier)) == ([], (0, 2))
    store(tier, 3)
    assert check_all(tier, range(5)) == 1
    tier.close()


def test_a_fingerprint_is_of_everything_that_gives_bytes_their_meaning() -> None:
    identity = KVIdentity(
        model_digest="ab" * 32,
        weight_format="float32",
        activation_dtype="float32",
        adapter_digest="",
        group_shapes=(GroupShape("full_attention", 2, 2, 8),),
    )
    slot = SlotFormat.of("float32", 8)
    group = KVGroup(GroupKind.FULL_ATTENTION, (0, 1), 2, slot)
    layout = KVLayout(16, (group,))
    root = HashRoot.of(identity)
    wide = replace(group, num_kv_heads=4)
    windowed = replace(group, kind=GroupKind.SLIDING_WINDOW, window=64)
    variants = [
        fingerprint(root, layout),
        fingerprint(root, layout, rank=1),
        fingerprint(HashRoot.of(replace(identity, model_digest="cd" * 32)), layout),
        fingerprint(HashRoot.of(identity, lossy_settings=["fp8"]), layout),
        fingerprint(root, replace(layout, block_size=32)),
        fingerprint(root, replace(layout, tensor_ranks=2)),
        fingerprint(root, replace(layout, pipeline_ranks=2)),
        fingerprint(root, replace(layout, groups=(group, group))),
        fingerprint(root, replace(layout, groups=(wide,))),
        fingerprint(root, replace(layout, groups=(windowed,))),
        fingerprint(root, replace(layout, groups=(replace(group, layers=(0, 2)),))),
        fingerprint(root, replace(layout, groups=(replace(group, slot=SlotFormat.of("bfloat16", 8)),))),
    ]  # fmt: skip
    assert len(set(variants)) == len(variants)
    assert {len(one) for one in variants} == {16}
    assert fingerprint(root, replace(layout)) == variants[0]


# ---- admission


def test_a_block_is_written_from_its_second_use_on(tmp_path: Path) -> None:
    tier = make_disk(tmp_path, min_frequency=2)
    tier.touch(chain(1, 2, 3))
    assert tier.prepare_store(chain(1, 2, 3)) == StorePlan((), ())
    assert tier.counters.unadmitted_blocks_total == 3
    tier.touch(chain(1, 2, 4))
    plan = store(tier, 1, 2, 4)
    assert [placement.key for placement in plan.placements] == chain(1, 2)
    assert held(tier, range(5)) == [1, 2]
    assert tier.counters.unadmitted_blocks_total == 4
    tier.close()


def test_a_bad_setting_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="min_frequency: -1 must be at least 0"):
        DiskConfig(tmp_path, 1, min_frequency=-1)
    with pytest.raises(ConfigError, match="decay_uses: -1 must be at least 0"):
        DiskConfig(tmp_path, 1, decay_uses=-1)


def test_the_folder_outlives_a_process_that_ends_as_it_should(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.kvtransfer.tiers.harness import *\n"
        "tier = make_disk(Path(sys.argv[1])); store(tier, 1, 2, 3); tier.close()"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        check=True,
        timeout=60,
    )
    tier = make_disk(tmp_path)
    assert check_all(tier, range(5)) == 3
    tier.close()


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ([], []),
        ([4], [(4, 1)]),
        ([3, 4, 5, 9, 10, 2], [(3, 3), (9, 2), (2, 1)]),
        ([0, 0], [(0, 1), (0, 1)]),
    ],
)
def test_neighbours_are_fetched_ahead_together(
    slots: list[int], runs: list[tuple[int, int]]
) -> None:
    assert list(_runs(slots)) == runs
