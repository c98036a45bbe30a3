"""The remote tier beyond the contract of tiers: sharing, finding, whose a block is, and a store that fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from core.events import EventKind
from kvtransfer.tiers.base import BlockKey, StorePlan, TierChange
from kvtransfer.tiers.remote.reach import FIRST_PAUSE_S
from kvtransfer.tiers.remote.store import StoreAway
from kvtransfer.tiers.remote.tier import RemoteTier
from kvtransfer.tiers.remote.value import HEADER_BYTES, header_of, name_of
from tests.kvtransfer.tiers.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    capacity_bytes,
    chain,
    check_all,
    content,
    held,
    key,
    load,
    store,
    write_all,
)
from tests.support.block_stores import Clock
from tests.support.memory_store import MemoryServer, MemoryStore

VALUE_BYTES = HEADER_BYTES + BLOCK_BYTES


class Fleet:
    """Workers that share one store."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.clock = Clock()
        self.tiers: list[RemoteTier] = []

    def worker(
        self,
        num_slots: int = 4,
        *,
        block_bytes: int = BLOCK_BYTES,
        fingerprint: bytes = FINGERPRINT,
    ) -> RemoteTier:
        store = MemoryStore(self.server, self.clock)
        num_bytes = num_slots * (HEADER_BYTES + block_bytes)
        self.tiers.append(RemoteTier(store, num_bytes, block_bytes, fingerprint, "lru"))
        return self.tiers[-1]

    def stored(self) -> list[int]:
        """What the store has."""
        return [n for n in range(100) if name(n) in self.server.values]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    for tier in fleet.tiers:
        tier.close()


def name(number: int) -> str:
    return name_of(FINGERPRINT, key(number))


def find(tier: RemoteTier, *numbers: int) -> int:
    """Ask for a chain and note what is there."""
    num_found = tier.ask(chain(*numbers))
    tier.note_found(chain(*numbers)[:num_found])
    return num_found


# ---------------------------------------------------------------- sharing


def test_what_one_worker_stored_another_one_finds(fleet: Fleet) -> None:
    first, second = fleet.worker(), fleet.worker()
    store(first, 1, 2, 3)
    assert second.lookup(chain(1, 2, 3)) == 0
    assert second.ask(chain(1, 2, 3, 4)) == 3
    assert second.lookup(chain(1, 2, 3)) == 0, "asking notes nothing"
    second.note_found(chain(1, 2, 3))
    assert second.lookup(chain(1, 2, 3, 4)) == 3
    assert load(second, chain(1, 2, 3)) == [content(key(n)) for n in (1, 2, 3)]
    counters = second.counters
    assert (counters.stored_blocks_total, counters.loaded_blocks_total) == (0, 3)
    assert second.figures()["found_blocks_total"] == 3
    assert second.take_changes() == [TierChange(EventKind.STORED, tuple(chain(1, 2, 3)))]


def test_a_worker_that_starts_anew_finds_what_it_stored(fleet: Fleet) -> None:
    before = fleet.worker()
    store(before, 1, 2)
    before.close()
    after = fleet.worker()
    assert find(after, 1, 2) == 2
    assert check_all(after, [1, 2]) == 2


def test_what_is_found_makes_room_and_keeps_its_own_chain(fleet: Fleet) -> None:
    first, second = fleet.worker(8), fleet.worker(4)
    store(first, 1, 2, 3)
    store(second, 7, 8, 9)
    assert find(second, 1, 2, 3) == 3
    assert held(second, range(10)) == [1, 2, 3, 7]
    assert second.counters.evicted_blocks_total == 2
    assert find(second, 1, 2, 3) == 3
    assert second.figures()["found_blocks_total"] == 3, "what is held is not found again"
    assert check_all(second, range(10)) == 4


def test_fewer_are_noted_where_the_rest_is_in_use(fleet: Fleet) -> None:
    first, second = fleet.worker(8), fleet.worker(4)
    store(first, 1, 2, 3, 4, 5, 6)
    store(second, 7, 8)
    reading = second.prepare_load(chain(7, 8))
    assert reading is not None
    assert find(second, 1, 2, 3, 4, 5, 6) == 6
    assert held(second, range(10)) == [1, 2, 7, 8]
    writing = second.prepare_store(chain(9, 10))
    assert writing is not None
    assert set(writing.evicted) == set(chain(1, 2))
    second.note_found(chain(3, 4))
    assert held(second, range(12)) == [7, 8], "no room at all"
    second.complete_load(reading)
    second.complete_store(writing.placements, ok=False)
    assert find(second, 1, 2, 3, 4, 5, 6) == 6
    assert held(second, range(10)) == [1, 2, 3, 4]


def test_a_block_being_written_is_not_noted_as_found(fleet: Fleet) -> None:
    first, second = fleet.worker(), fleet.worker()
    store(first, 1, 2)
    plan = second.prepare_store(chain(1))
    assert plan is not None
    assert find(second, 1, 2) == 2
    assert held(second, [1, 2]) == [2]
    write_all(second, plan.placements)
    second.complete_store(plan.placements, ok=True)
    assert check_all(second, [1, 2]) == 2


def test_the_engine_thread_never_reaches_for_the_store(fleet: Fleet) -> None:
    other, tier = fleet.worker(), fleet.worker()
    store(other, 1)
    store(tier, 2, 3, 4, 5)
    fleet.server.calls.clear()
    tier.note_found(chain(1))
    placements = tier.prepare_load(chain(1))
    assert placements is not None
    tier.touch(chain(1, 2))
    tier.complete_load(placements, placements)
    plan = tier.prepare_store(chain(6, 7, 8))
    assert plan is not None
    tier.complete_store(plan.placements, ok=False)
    assert (tier.lookup(chain(1)), tier.figures()["store_is_away"]) == (0, 0)
    tier.clear()
    assert fleet.server.calls == []


def test_anybody_may_ask_while_a_block_is_on_its_way(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 1)
    is_reading, may_go_on = threading.Event(), threading.Event()

    def before(call: str) -> None:
        if call == "get":
            is_reading.set()
            assert may_go_on.wait(20)

    fleet.server.before = before
    reader = threading.Thread(target=load, args=(tier, chain(1)))
    reader.start()
    assert is_reading.wait(20)
    assert tier.ask(chain(1, 2)) == 1
    may_go_on.set()
    reader.join()
    assert tier.counters.loaded_blocks_total == 1


# ---------------------------------------------------------------- whose a block is


def test_what_leaves_is_deleted_with_the_next_write(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 1, 2, 3, 4)
    plan = tier.prepare_store(chain(5, 6))
    assert plan is not None
    assert fleet.stored() == [1, 2, 3, 4]
    write_all(tier, plan.placements[:1])
    assert fleet.stored() == [1, 2, 5]
    write_all(tier, plan.placements[1:])
    tier.complete_store(plan.placements, ok=True)
    assert fleet.stored() == [1, 2, 5, 6]


def test_what_another_worker_stored_is_only_forgotten(fleet: Fleet) -> None:
    first, second = fleet.worker(), fleet.worker()
    store(first, 1, 2)
    find(second, 1)
    store(second, 2)  # computed here too: the store has it already
    store(second, 5, 6, 7, 8)
    assert held(second, range(10)) == [5, 6, 7, 8]
    assert fleet.stored() == [1, 2, 5, 6, 7, 8]
    assert check_all(first, [1, 2]) == 2


def test_what_the_owner_deleted_is_missing_and_is_no_damage(fleet: Fleet) -> None:
    first, second = fleet.worker(), fleet.worker()
    store(first, 1, 2)
    find(second, 1, 2)
    store(first, 3, 4, 5)
    assert load(second, chain(1, 2)) == [content(key(1)), None]
    assert held(second, [1, 2]) == [1]
    assert second.counters.damaged_blocks_total == 0
    assert second.figures()["missing_blocks_total"] == 1


def test_what_was_to_be_deleted_and_is_found_stays(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 1, 2, 3, 4)
    plan = tier.prepare_store(chain(5, 6))
    assert plan is not None
    tier.complete_store(plan.placements, ok=False)
    assert find(tier, 1, 2, 3) == 3
    store(tier, 7)
    assert fleet.stored() == [1, 2, 3, 7]
    assert check_all(tier, range(10)) == 4
    store(tier, 10, 11, 12, 13)
    assert fleet.stored() == [10, 11, 12, 13], "it is still this worker's to delete"


def test_a_store_that_was_given_up_leaves_nothing(fleet: Fleet) -> None:
    tier = fleet.worker()
    plan = tier.prepare_store(chain(1, 2))
    assert plan is not None
    write_all(tier, plan.placements)
    tier.complete_store(plan.placements, ok=False)
    store(tier, 3)
    assert fleet.stored() == [3]


def test_closing_deletes_what_had_left_and_nothing_else(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 1, 2, 3, 4)
    plan = tier.prepare_store(chain(5))
    assert plan is not None
    tier.complete_store(plan.placements, ok=False)
    tier.close()
    tier.close()
    assert fleet.stored() == [1, 2, 3]


def test_clear_forgets_and_erases_nothing(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 1, 2, 3)
    tier.clear()
    assert held(tier, range(5)) == []
    assert fleet.stored() == [1, 2, 3]
    assert find(tier, 1, 2, 3) == 3
    assert check_all(tier, range(5)) == 3


def test_what_clear_left_gives_way_to_what_is_new(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 3, 2, 1)
    tier.clear()
    store(tier, 11, 12)
    assert len(fleet.stored()) == 4
    store(tier, 13, 14)
    assert fleet.stored() == [11, 12, 13, 14]
    tier.clear()
    store(tier, 12)
    assert fleet.stored() == [11, 12, 13, 14]
    assert check_all(tier, [12]) == 1


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("block_bytes", [1, 1000, 4096])
def test_slots_are_what_fits_to_the_byte(block_bytes: int) -> None:
    whole = HEADER_BYTES + block_bytes
    for extra, num_slots in ((0, 3), (-1, 2), (whole - 1, 3)):
        store = MemoryStore(MemoryServer())
        tier = RemoteTier(store, 3 * whole + extra, block_bytes, FINGERPRINT)
        assert tier.num_slots == num_slots


def test_what_is_added_never_exceeds_its_bound_whatever_fails(fleet: Fleet) -> None:
    """Two workers at random; the store fails now and then, also after it has done what was asked."""
    draw = random.Random(11)
    tiers = [fleet.worker(4), fleet.worker(3)]
    put = fleet.server.put
    bound = capacity_bytes("remote", 4 + 3)

    def flaky_put(name: str, value: bytes) -> bool:
        is_added = put(name, value)
        assert fleet.server.used_bytes() <= bound
        if draw.random() < 0.1:
            raise ConnectionResetError("the answer is lost")
        return is_added

    def before(call: str) -> None:
        if draw.random() < 0.1:
            raise ConnectionResetError("gone")

    fleet.server.put, fleet.server.before = flaky_put, before  # type: ignore[method-assign]
    for _ in range(600):
        fleet.clock.now_s += draw.random() * FIRST_PAUSE_S
        tier = draw.choice(tiers)
        numbers = draw.sample(range(20), draw.randint(1, 3))
        if draw.random() < 0.3:
            find(tier, *numbers)
        elif draw.random() < 0.05:
            tier.clear()
        elif (plan := tier.prepare_store(chain(*numbers))) is not None:
            try:
                write_all(tier, plan.placements)
                tier.complete_store(plan.placements, ok=True)
            except OSError:
                tier.complete_store(plan.placements, ok=False)
        for number in held(tier, range(20)):
            if tier.lookup([key(number)]):  # the store may have gone away in between
                assert load(tier, [key(number)]) in ([content(key(number))], [None])
    assert [tier.counters.damaged_blocks_total for tier in tiers] == [0, 0]
    assert all(tier.counters.stored_blocks_total > 50 for tier in tiers)
    fleet.server.before = lambda call: None


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("byte", [0, 8, 12, 16, 24, 39, 40, 55, 56, 700, VALUE_BYTES - 1])
def test_one_wrong_byte_anywhere_is_a_miss_and_is_deleted(fleet: Fleet, byte: int) -> None:
    first, second = fleet.worker(), fleet.worker()
    store(first, 1, 2)
    find(second, 1, 2)
    fleet.server.flip(name(1), byte)
    assert load(second, chain(1, 2)) == [None, content(key(2))]
    assert held(second, [1, 2]) == [2]
    assert second.counters.damaged_blocks_total == 1
    assert second.figures()["missing_blocks_total"] == 0
    assert fleet.stored() == [2]
    assert load(first, chain(1)) == [None]
    assert first.counters.damaged_blocks_total == 0, "it is missing by now"
    store(first, 1)
    assert find(second, 1, 2) == 2
    assert check_all(second, [1, 2]) == 2


@pytest.mark.parametrize("size", [0, 10, VALUE_BYTES - 1, VALUE_BYTES + 1])
def test_a_value_of_another_size_is_damage(fleet: Fleet, size: int) -> None:
    tier = fleet.worker()
    fleet.server.values[name(1)] = bytes(size)
    assert find(tier, 1) == 1
    assert load(tier, chain(1)) == [None]
    assert (tier.counters.damaged_blocks_total, fleet.stored()) == (1, [])


def test_a_right_value_under_a_wrong_name_is_damage(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 1)
    fleet.server.values[name(2)] = fleet.server.values[name(1)]
    assert find(tier, 2) == 1
    assert load(tier, chain(2)) == [None]
    assert tier.counters.damaged_blocks_total == 1


def test_another_version_is_no_block(fleet: Fleet) -> None:
    tier = fleet.worker()
    block = content(key(1))
    header = bytearray(header_of(name(1), memoryview(block)))
    header[8] += 1
    fleet.server.values[name(1)] = bytes(header) + block
    find(tier, 1)
    assert load(tier, chain(1)) == [None]
    assert tier.counters.damaged_blocks_total == 1


def test_other_kv_and_other_groups_never_meet(fleet: Fleet) -> None:
    mine, others = fleet.worker(), fleet.worker(fingerprint=b"another rank, 16")
    store(mine, 1)
    assert others.ask(chain(1)) == 0
    assert mine.ask([BlockKey(key(1).hash, group=1)]) == 0
    others.note_found(chain(1))  # even so
    assert load(others, chain(1)) == [None]
    assert check_all(mine, [1]) == 1


# ---------------------------------------------------------------- a store that fails


def test_nothing_is_found_while_the_store_is_away_and_all_of_it_after(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 1, 2)
    fleet.server.is_up = False
    assert tier.ask(chain(1, 2)) == 0
    assert tier.lookup(chain(1, 2)) == 0
    assert load(tier, chain(2)) == [None]  # found a moment before: a miss when it is read
    assert tier.prepare_store(chain(1, 3, 4)) == StorePlan((), ())
    assert tier.counters.unadmitted_blocks_total == 2
    assert tier.figures()["store_is_away"] == 1
    fleet.server.is_up = True
    fleet.clock.now_s += FIRST_PAUSE_S
    assert tier.ask(chain(1, 2)) == 2
    tier.note_found(chain(1, 2))
    assert check_all(tier, [1, 2]) == 2
    assert tier.figures()["store_is_away"] == 0


def test_a_store_that_goes_away_in_the_middle_is_a_miss(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 1, 2, 3)
    writing = tier.prepare_store(chain(4))
    reading = tier.prepare_load(chain(1, 2))
    assert writing is not None
    assert reading is not None
    fleet.server.is_up = False
    assert not tier.read(reading[0], memoryview(bytearray(BLOCK_BYTES)))
    assert not tier.read(reading[1], memoryview(bytearray(BLOCK_BYTES)))
    with pytest.raises(StoreAway, match="memory is away"):
        write_all(tier, writing.placements)
    tier.complete_load(reading, reading)
    tier.complete_store(writing.placements, ok=False)
    figures = tier.figures()
    assert (figures["missing_blocks_total"], tier.counters.damaged_blocks_total) == (2, 0)
    assert (figures["store_failures_total"], tier.counters.failed_blocks_total) == (1, 1)
    fleet.server.is_up = True
    fleet.clock.now_s += FIRST_PAUSE_S
    assert held(tier, range(5)) == [3]
    store(tier, 5)
    assert fleet.stored() == [1, 2, 3, 5]
    assert find(tier, 1, 2) == 2
    assert check_all(tier, range(6)) == 4
    store(tier, 6, 7, 8, 9)
    assert fleet.stored() == [6, 7, 8, 9], "they are still this worker's to delete"


def test_a_write_waits_for_no_deletion_that_fails(fleet: Fleet) -> None:
    """A block goes in only when those that left for it are out: else there would be more than the bound."""
    tier = fleet.worker()
    store(tier, 1, 2, 3, 4)

    def refuse(call: str) -> None:
        if call == "delete":
            raise ConnectionResetError("gone")

    fleet.server.before = refuse
    plan = tier.prepare_store(chain(5))
    assert plan is not None
    with pytest.raises(StoreAway):
        write_all(tier, plan.placements)
    tier.complete_store(plan.placements, ok=False)
    assert fleet.stored() == [1, 2, 3, 4]
    fleet.server.before = lambda call: None
    fleet.clock.now_s += FIRST_PAUSE_S
    store(tier, 5)
    assert fleet.stored() == [1, 2, 3, 5]


def test_a_full_store_is_asked_and_not_written_to(fleet: Fleet) -> None:
    tier = fleet.worker()
    store(tier, 1, 2)
    fleet.server.max_bytes = 2 * VALUE_BYTES
    plan = tier.prepare_store(chain(3))
    assert plan is not None
    with pytest.raises(OSError, match="there is no room"):
        write_all(tier, plan.placements)
    tier.complete_store(plan.placements, ok=False)
    assert tier.prepare_store(chain(3)) == StorePlan((), ())
    assert (tier.ask(chain(1, 2)), check_all(tier, [1, 2])) == (2, 2)
    assert tier.figures()["store_refusals_total"] == 1
    fleet.server.max_bytes = None
    fleet.clock.now_s += FIRST_PAUSE_S
    store(tier, 3)
    assert check_all(tier, range(5)) == 3
