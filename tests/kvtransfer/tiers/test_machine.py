"""Random lives of a tier's blocks: stores that fail, readers that overlap, flipped bits, restarts; a model beside.

The model is a dict of what must be found and lists of what is under way; it shares no code with the tier. Which block
is evicted is the policy's business: the model only holds that it was one nobody used.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from core.events import EventKind
from kvtransfer.tiers.base import BlockKey, Placement, Tier
from kvtransfer.tiers.policies import POLICIES
from kvtransfer.tiers.remote.tier import RemoteTier
from kvtransfer.tiers.remote.value import header_of, name_of
from tests.kvtransfer.tiers.harness import (
    FINGERPRINT,
    capacity_bytes,
    chain,
    content,
    damage,
    key,
    make_tier,
    write_all,
)
from tests.support.memory_store import MemoryStore

NUMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
SMALL = 64

loading = precondition(lambda self: self.loads)
storing = precondition(lambda self: self.stores)
holding = precondition(lambda self: self.found)


class TierMachine(RuleBasedStateMachine):
    """Any legal calls of the engine thread, with the movers' work done at once or never."""

    KIND = ""

    @initialize(num_slots=st.integers(1, 5), policy=st.sampled_from(POLICIES))
    def build(self, num_slots: int, policy: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.num_slots, self.policy = num_slots, policy
        self.found: set[BlockKey] = set()
        self.told: set[BlockKey] = set()
        self.damaged: set[BlockKey] = set()
        self.num_damaged = 0
        self.stores: list[tuple[Placement, ...]] = []
        self.loads: list[list[Placement]] = []
        self.tier = self.open()

    def open(self) -> Tier:
        folder = Path(self.folder.name)
        return make_tier(self.KIND, folder, self.num_slots, self.policy, block_bytes=SMALL)

    def used(self) -> set[BlockKey]:
        """Keys that a mover may be at."""
        batches = [*self.loads, *self.stores]
        return {placement.key for batch in batches for placement in batch}

    def is_right(self, one: BlockKey) -> bool:
        """Whether a block must be read as it was written."""
        return one not in self.damaged

    def is_damaged(self, one: BlockKey) -> bool:
        """Whether it must be found out to be something else."""
        return one in self.damaged

    def slots(self) -> int:
        """Slots that must be taken."""
        return len(self.found | self.used())

    @rule(numbers=NUMBERS)
    def prepare_store(self, numbers: list[int]) -> None:
        keys = chain(*numbers)
        absent = [key for key in dict.fromkeys(keys) if key not in self.found | self.used()]
        evictable = self.found - self.used() - set(keys)
        num_leaving = max(0, len(absent) - (self.num_slots - self.slots()))
        plan = self.tier.prepare_store(keys)
        if absent and num_leaving > len(evictable):
            assert plan is None
            return
        assert plan is not None
        assert [placement.key for placement in plan.placements] == absent
        assert len(plan.evicted) == len(set(plan.evicted)) == num_leaving
        assert set(plan.evicted) <= evictable
        self.found -= set(plan.evicted)
        self.damaged -= set(plan.evicted)
        if absent:
            self.stores.append(plan.placements)

    @storing
    @rule(data=st.data(), is_written=st.booleans(), ok=st.booleans())
    def complete_store(self, data: st.DataObject, is_written: bool, ok: bool) -> None:
        placements = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        ok = ok and is_written
        if is_written:
            write_all(self.tier, placements)
        self.tier.complete_store(placements, ok)
        if ok:
            self.found |= {placement.key for placement in placements}

    @rule(numbers=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def prepare_load(self, numbers: list[int]) -> None:
        keys = chain(*numbers)
        num_found = next((i for i, key in enumerate(keys) if key not in self.found), len(keys))
        assert self.tier.lookup(keys) == num_found
        placements = self.tier.prepare_load(keys)
        assert (placements is not None) == (num_found == len(keys))
        if placements:
            assert [placement.key for placement in placements] == keys
            self.loads.append(placements)

    @loading
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        placements = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        denied, wrong = [], set()
        for placement in placements:
            buffer = bytearray(SMALL)
            wrong |= {placement.key} if self.is_damaged(placement.key) else set()
            must_be_right = self.is_right(placement.key)  # reading may delete what is wrong
            is_right = self.tier.read(placement, memoryview(buffer))
            assert is_right == must_be_right
            if is_right:
                assert buffer == content(placement.key, SMALL)
            else:
                denied.append(placement)
        self.tier.complete_load(placements, denied)
        self.num_damaged += len(self.found & wrong)
        self.found -= {placement.key for placement in denied}
        self.damaged &= self.found | self.used()

    @rule(numbers=NUMBERS)
    def touch(self, numbers: list[int]) -> None:
        self.tier.touch(chain(*numbers))

    @holding
    @rule(data=st.data(), byte=st.integers(0, SMALL - 1))
    def damage(self, data: st.DataObject, byte: int) -> None:
        """A bit of a block that is found flips; never back."""
        victim = data.draw(st.sampled_from(sorted(self.found)))
        if victim in self.damaged:
            return
        placements = self.tier.prepare_load([victim])
        assert placements is not None
        damage(self.tier, placements[0], Path(self.folder.name), byte)
        self.tier.complete_load(placements)
        self.damaged.add(victim)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.found.clear()
        # Stores under way will be given up, whatever their movers say; let them end here.
        for placements in self.stores:
            write_all(self.tier, placements)
            self.tier.complete_store(placements, ok=True)
        self.stores.clear()
        self.damaged &= self.used()

    # ---- always

    @invariant()
    def what_is_found_is_what_must_be(self) -> None:
        found = {key(number) for number in range(10) if self.tier.lookup([key(number)])}
        assert found == self.found
        assert len(self.tier) == self.slots() <= self.num_slots

    @invariant()
    def changes_tell_what_is_found(self) -> None:
        for change in self.tier.take_changes():
            keys = set(change.keys)
            assert len(keys) == len(change.keys)
            if change.kind is EventKind.STORED:
                assert not keys & self.told
                self.told |= keys
            else:
                assert keys <= self.told
                self.told -= keys
        assert self.told == self.found

    @invariant()
    def damage_is_counted_once(self) -> None:
        assert self.tier.counters.damaged_blocks_total == self.num_damaged

    @invariant()
    def no_slot_has_two_users(self) -> None:
        slots = {}
        for placement in [one for batch in [*self.loads, *self.stores] for one in batch]:
            assert slots.setdefault(placement.slot, placement.key) == placement.key
            assert 0 <= placement.slot < self.num_slots

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            self.folder.cleanup()


class HostMachine(TierMachine):
    KIND = "host"


class RemoteMachine(TierMachine):
    """The same, where the store forgets blocks, and others add some that are found by asking."""

    KIND = "remote"

    def open(self) -> RemoteTier:
        tier = super().open()
        assert isinstance(tier, RemoteTier)
        assert isinstance(tier.store, MemoryStore)
        self.remote = tier
        self.server = tier.store.server
        self.gone: set[BlockKey] = set()  # what was taken from the store, and not by the tier
        self.others: set[str] = set()  # names of values that other workers stored
        return tier

    def value(self, one: BlockKey) -> bytes | None:
        value = self.server.values.get(name_of(FINGERPRINT, one))
        assert value is not None or one in self.gone or one not in self.found, "who deleted it?"
        return value

    def is_right(self, one: BlockKey) -> bool:
        return self.value(one) == right_value(one)

    def is_damaged(self, one: BlockKey) -> bool:
        return self.value(one) is not None and not self.is_right(one)

    @rule(number=st.integers(0, 9))
    def another_worker_stores(self, number: int) -> None:
        name = name_of(FINGERPRINT, key(number))
        if self.server.put(name, right_value(key(number))):
            self.others.add(name)
            self.gone.discard(key(number))

    @holding
    @rule(data=st.data())
    def the_store_forgets(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.found)))
        self.server.values.pop(name_of(FINGERPRINT, victim), None)
        self.gone.add(victim)

    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
    def find(self, numbers: list[int]) -> None:
        keys = chain(*numbers)
        names = [name_of(FINGERPRINT, one) for one in keys]
        num_there = next((i for i, n in enumerate(names) if n not in self.server.values), len(keys))
        assert self.remote.ask(keys) == num_there
        keys = keys[:num_there]
        before, used = set(self.found), self.used()
        absent = [one for one in keys if one not in before | used]
        evictable = before - used - set(keys)
        num_free = self.num_slots - self.slots()
        noted = absent[: num_free + len(evictable)]
        self.remote.note_found(keys)
        self.found = {key(number) for number in range(10) if self.tier.lookup([key(number)])}
        assert self.found - before == set(noted)
        assert before - self.found <= evictable
        assert len(before - self.found) == max(0, len(noted) - num_free)

    @invariant()
    def what_this_worker_stored_keeps_its_bound(self) -> None:
        self.others &= self.server.values.keys()
        num_bytes = self.server.used_bytes() - len(self.others) * len(right_value(key(0)))
        assert num_bytes <= capacity_bytes("remote", self.num_slots, SMALL)


def right_value(one: BlockKey) -> bytes:
    block = content(one, SMALL)
    return header_of(name_of(FINGERPRINT, one), memoryview(block)) + block


class DiskMachine(TierMachine):
    """The same, and restarts: what was found is found again, and what was under way is not."""

    KIND = "disk"

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = self.open()
        assert self.tier.counters.damaged_blocks_total == 0
        found = {key(number) for number in range(10) if self.tier.lookup([key(number)])}
        # A block that had left may be found again while nothing else is in its slot.
        assert self.found <= found
        self.damaged = {one for one in found if one in self.damaged or not self.reads_right(one)}
        self.stores, self.loads = [], []
        self.num_damaged = self.tier.counters.damaged_blocks_total
        self.found = {key(number) for number in range(10) if self.tier.lookup([key(number)])}
        self.damaged &= self.found
        self.told = set(self.found)

    def reads_right(self, one: BlockKey) -> bool:
        """Whether what is found is right, as its digest says too; a block that is not is dropped."""
        placements = self.tier.prepare_load([one])
        assert placements is not None
        buffer = bytearray(SMALL)
        is_right = self.tier.read(placements[0], memoryview(buffer))
        assert not is_right or buffer == content(one, SMALL)
        self.tier.complete_load(placements, () if is_right else placements)
        if not is_right:
            self.tier.take_changes()
        return is_right

    @invariant()
    def files_keep_their_bound(self) -> None:
        num_bytes = sum(path.stat().st_size for path in Path(self.folder.name).iterdir())
        assert num_bytes <= capacity_bytes("disk", self.num_slots, SMALL)


TestHostMachine = HostMachine.TestCase
TestRemoteMachine = RemoteMachine.TestCase
TestDiskMachine = DiskMachine.TestCase
