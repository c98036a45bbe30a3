"""What every tier promises (kvtransfer/tiers/base.py), over each of them with each policy."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.events import EventKind
from kvtransfer.tiers.base import Placement, StorePlan, Tier, TierChange
from kvtransfer.tiers.disk import DiskConfig, DiskTier
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.policies import POLICIES
from kvtransfer.tiers.remote.tier import RemoteTier
from tests.kvtransfer.tiers.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    KINDS,
    capacity_bytes,
    chain,
    check_all,
    content,
    damage,
    held,
    key,
    load,
    make_store,
    make_tier,
    store,
    used_bytes,
    write_all,
)


@pytest.fixture(params=product(KINDS, POLICIES), ids=lambda pair: "-".join(pair))
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    kind, policy = request.param
    tier = make_tier(kind, tmp_path, 4, policy)
    yield tier
    tier.close()


def test_what_was_stored_is_loaded_byte_for_byte(tier: Tier) -> None:
    store(tier, 1, 2, 3)
    assert tier.lookup(chain(1, 2, 3, 4)) == 3
    assert tier.lookup(chain(4, 1)) == 0
    assert load(tier, chain(3, 1)) == [content(key(3)), content(key(1))]
    assert (tier.counters.stored_blocks_total, tier.counters.loaded_blocks_total) == (3, 2)


def test_nothing_is_found_before_it_is_whole(tier: Tier) -> None:
    plan = tier.prepare_store(chain(1, 2))
    assert plan is not None
    assert tier.lookup(chain(1, 2)) == 0
    write_all(tier, plan.placements)
    assert tier.lookup(chain(1, 2)) == 0
    assert tier.prepare_load(chain(1)) is None
    tier.complete_store(plan.placements[1:], ok=True)
    assert held(tier, [1, 2]) == [2]
    tier.complete_store(plan.placements[:1], ok=True)
    assert tier.lookup(chain(1, 2)) == 2


def test_a_block_held_or_being_written_is_not_stored_again(tier: Tier) -> None:
    first = tier.prepare_store(chain(1, 2))
    second = tier.prepare_store(chain(1, 2, 3))
    assert first is not None
    assert second is not None
    assert [placement.key for placement in second.placements] == chain(3)
    # The second store fails: that is nothing to the first one's blocks.
    tier.complete_store(second.placements, ok=False)
    write_all(tier, first.placements)
    tier.complete_store(first.placements, ok=True)
    assert held(tier, [1, 2, 3]) == [1, 2]
    assert tier.prepare_store(chain(1, 2, 2)) == StorePlan((), ())


def test_groups_are_told_apart(tier: Tier) -> None:
    keys = [key(1, group=0), key(1, group=1)]
    plan = tier.prepare_store(keys)
    assert plan is not None
    write_all(tier, plan.placements)
    tier.complete_store(plan.placements, ok=True)
    assert load(tier, keys) == [content(keys[0]), content(keys[1])]
    assert content(keys[0]) != content(keys[1])
    assert tier.lookup([key(1, group=2)]) == 0


def test_a_batch_never_evicts_its_own_members(tier: Tier) -> None:
    """The first prompt is A B C D, the second A E F G: A is a hit after it, although it was the next to leave."""
    store(tier, 1, 2, 3, 4)
    load(tier, chain(4, 3, 2))
    plan = store(tier, 1, 5, 6, 7)
    assert set(plan.evicted) == set(chain(2, 3, 4))
    assert check_all(tier, range(10)) == 4
    assert tier.lookup(chain(1, 5, 6, 7)) == 4


def test_a_store_evicts_all_it_needs_or_nothing(tier: Tier) -> None:
    store(tier, 1, 2, 3, 4)
    placements = tier.prepare_load(chain(1, 2))
    assert placements is not None
    assert tier.prepare_store(chain(5, 6, 7)) is None
    assert held(tier, range(8)) == [1, 2, 3, 4]
    assert tier.counters.refused_stores_total == 1
    plan = store(tier, 5, 6)
    assert set(plan.evicted) == set(chain(3, 4))
    tier.complete_load(placements)
    assert check_all(tier, range(8)) == 4


def test_a_store_of_more_than_fits_is_refused(tier: Tier) -> None:
    assert tier.prepare_store(chain(1, 2, 3, 4, 5)) is None
    assert len(tier) == 0


def test_a_block_that_is_read_stays_however_many_read_it(tier: Tier) -> None:
    store(tier, 1, 2, 3, 4)
    first, second = tier.prepare_load(chain(1)), tier.prepare_load(chain(1))
    assert first is not None
    assert second is not None
    tier.complete_load(first)
    for number in range(5, 30):
        store(tier, number)
    buffer = bytearray(BLOCK_BYTES)
    assert tier.read(second[0], memoryview(buffer))
    assert bytes(buffer) == content(key(1))
    tier.complete_load(second)
    with pytest.raises(AssertionError):
        tier.complete_load(second)


def test_a_failed_store_leaves_its_slots_free(tier: Tier) -> None:
    store(tier, 1)
    plan = tier.prepare_store(chain(2, 3))
    assert plan is not None
    write_all(tier, plan.placements)  # all the same
    tier.complete_store(plan.placements, ok=False)
    assert (held(tier, range(5)), len(tier)) == ([1], 1)
    assert tier.counters.failed_blocks_total == 2
    assert store(tier, 4, 5, 6).evicted == ()
    assert check_all(tier, range(8)) == 4


def test_a_damaged_block_is_a_miss_and_is_dropped(tier: Tier, tmp_path: Path) -> None:
    store(tier, 1, 2)
    tier.take_changes()
    placements = tier.prepare_load(chain(1, 2))
    others = tier.prepare_load(chain(1))
    assert placements is not None
    assert others is not None
    damage(tier, placements[0], tmp_path)
    buffer = bytearray(BLOCK_BYTES)
    assert not tier.read(placements[0], memoryview(buffer))
    assert tier.read(placements[1], memoryview(buffer))
    tier.complete_load(placements, placements[:1])
    assert held(tier, [1, 2]) == [2]
    assert tier.take_changes() == [TierChange(EventKind.REMOVED, (key(1),))]
    assert len(tier) == 2, "the other reader still has the slot"
    assert tier.prepare_store(chain(1)) == StorePlan((), ())
    tier.complete_load(others, others)
    assert (len(tier), tier.counters.damaged_blocks_total) == (1, 1)
    store(tier, 1)
    assert check_all(tier, [1, 2]) == 2


def test_changes_tell_what_is_found(tier: Tier) -> None:
    store(tier, 1, 2, 3)
    plan = store(tier, 4, 5)
    assert tier.take_changes() == [
        TierChange(EventKind.STORED, tuple(chain(1, 2, 3))),
        TierChange(EventKind.REMOVED, plan.evicted),
        TierChange(EventKind.STORED, tuple(chain(4, 5))),
    ]
    assert tier.take_changes() == []


def test_a_chain_leaves_tail_first(tier: Tier) -> None:
    store(tier, 1, 2, 3, 4)
    assert store(tier, 5, 6).evicted == tuple(chain(4, 3))
    tier.touch(chain(1, 2))
    load(tier, chain(5, 6))
    assert tier.lookup(chain(1, 2)) == 2


def test_clear_gives_up_every_block(tier: Tier) -> None:
    store(tier, 1, 2)
    reading = tier.prepare_load(chain(1))
    writing = tier.prepare_store(chain(3))
    assert reading is not None
    assert writing is not None
    tier.clear()
    assert held(tier, range(5)) == []
    assert len(tier) == 2
    write_all(tier, writing.placements)
    tier.complete_store(writing.placements, ok=True)
    tier.complete_load(reading)
    assert (held(tier, range(5)), len(tier)) == ([], 0)
    assert [change.kind for change in tier.take_changes()] == ["stored", "removed", "removed"]
    store(tier, 1, 2, 3, 4)
    assert check_all(tier, range(5)) == 4


def test_mistakes_are_refused(tier: Tier) -> None:
    plan = store(tier, 1)
    with pytest.raises(AssertionError):
        tier.complete_store(plan.placements, ok=True)
    with pytest.raises(AssertionError):
        tier.complete_load(plan.placements)
    with pytest.raises(AssertionError):
        tier.complete_store([plan.placements[0]._replace(slot=3)], ok=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_is_as_large_as_it_was_told_to_the_byte(kind: str, tmp_path: Path) -> None:
    fitting = capacity_bytes(kind, 4)
    for num_bytes, num_slots in ((fitting, 4), (fitting - 1, 3), (fitting + BLOCK_BYTES - 1, 4)):
        tier = make_tier_of(kind, tmp_path, num_bytes)
        assert tier.num_slots == num_slots
        store(tier, *range(num_slots))
        assert used_bytes(tier, tmp_path) <= num_bytes
        store(tier, *range(10, 10 + num_slots))
        assert used_bytes(tier, tmp_path) <= num_bytes
        tier.close()
        tier.close()
    with pytest.raises(ConfigError, match="bytes hold no block of 1000 bytes"):
        make_tier_of(kind, tmp_path, capacity_bytes(kind, 1) - 1)
    with pytest.raises(ConfigError, match="'fifo' is unknown"):
        make_tier(kind, tmp_path, 4, "fifo")


def make_tier_of(kind: str, folder: Path, num_bytes: int) -> Tier:
    if kind == "host":
        return HostTier(num_bytes, BLOCK_BYTES)
    if kind == "disk":
        return DiskTier(DiskConfig(folder, num_bytes, min_frequency=0), BLOCK_BYTES, FINGERPRINT)
    return RemoteTier(make_store(kind), num_bytes, BLOCK_BYTES, FINGERPRINT)


def test_rounds_of_prompts_with_readers_beside_them(tier: Tier) -> None:
    """12 prefixes, one of them hot, loads under way at random; then a scan of 100 chains used once."""
    draw = random.Random(7)
    prompts = [
        [100 * number + place for place in range(draw.randint(1, 4))] for number in range(12)
    ]
    everything = chain(*(number for prompt in prompts for number in prompt))
    under_way = []
    for _ in range(300):
        prompt = prompts[0] if draw.random() < 0.5 else draw.choice(prompts)
        found = tier.lookup(chain(*prompt))
        tier.touch(chain(*prompt))
        if found and draw.random() < 0.5:
            placements = tier.prepare_load(chain(*prompt[:found]))
            assert placements is not None
            under_way.append(placements)
        pinned = {placement.key for load in under_way for placement in load}
        found_keys = {key for key in everything if tier.lookup([key])}
        evictable = found_keys - pinned - set(chain(*prompt))
        num_absent = len(set(chain(*prompt)) - found_keys)
        num_free = tier.num_slots - len(tier)
        plan = tier.prepare_store(chain(*prompt))
        assert (plan is None) == (num_absent > num_free + len(evictable))
        if plan is not None:
            write_all(tier, plan.placements)
            tier.complete_store(plan.placements, ok=draw.random() < 0.9)
        while len(under_way) > 2 or (under_way and draw.random() < 0.5):
            placements = under_way.pop(draw.randrange(len(under_way)))
            for placement in placements:
                buffer = bytearray(BLOCK_BYTES)
                assert tier.read(placement, memoryview(buffer))
                assert bytes(buffer) == content(placement.key)
            tier.complete_load(placements)
        assert len(tier) <= tier.num_slots
    for placements in under_way:
        tier.complete_load(placements)
    refused = tier.counters.refused_stores_total
    for number in range(10_000, 10_100):
        store(tier, number)
    assert tier.counters.refused_stores_total == refused, "refused with nothing in use"
    assert check_all(tier, [*range(1200), *range(10_000, 10_100)]) == tier.num_slots
    assert tier.counters.damaged_blocks_total == 0


def read_all(tier: Tier, placements: list[Placement], wrong: list[Placement]) -> None:
    for placement in placements:
        buffer = bytearray(tier.block_bytes)
        is_right = tier.read(placement, memoryview(buffer))
        if not is_right or buffer != content(placement.key, tier.block_bytes):
            wrong.append(placement)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_move_bytes_of_many_stores_and_loads_at_once(kind: str, tmp_path: Path) -> None:
    tier = make_tier(kind, tmp_path, 8, "arc", block_bytes=64 * 1024)
    wrong: list[Placement] = []
    draw = random.Random(3)
    for _ in range(60):
        stores = [tier.prepare_store(chain(draw.randrange(20), 20 + draw.randrange(20)))]
        stores += [tier.prepare_store(chain(draw.randrange(20)))]
        plans = [plan for plan in stores if plan is not None]
        loads = [tier.prepare_load([key(n)]) or [] for n in range(40) if tier.lookup([key(n)])]
        threads = [
            threading.Thread(target=write_all, args=(tier, plan.placements)) for plan in plans
        ]
        threads += [threading.Thread(target=read_all, args=(tier, one, wrong)) for one in loads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for plan in plans:
            tier.complete_store(plan.placements, ok=True)
        for placements in loads:
            tier.complete_load(placements)
    assert wrong == []
    assert check_all(tier, range(40)) == len(tier) == 8
    tier.close()
