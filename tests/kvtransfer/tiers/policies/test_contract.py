"""What every eviction policy promises (kvtransfer/tiers/policies/base.py), over each of them."""

from __future__ import annotations

import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.errors import ConfigError
from kvtransfer.tiers.policies import POLICIES, EvictionPolicy, make_policy

each_policy = pytest.mark.parametrize("name", POLICIES)


def make(name: str, capacity: int, *held: int) -> EvictionPolicy[int]:
    """A policy that holds some keys, the first one oldest."""
    policy: EvictionPolicy[int] = make_policy(name, capacity)
    for key in held:
        assert policy.admit([key]) == []
        policy.unpin([key])
    return policy


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'mru' is unknown; known: arc, lru"):
        make_policy("mru", 4)


@each_policy
def test_nothing_leaves_while_there_is_room(name: str) -> None:
    policy = make(name, 4, 1, 2)
    assert policy.admit([3, 4]) == []
    assert (len(policy), policy.num_pinned, policy.num_evictable) == (4, 2, 2)


@each_policy
def test_the_oldest_leave_first_and_in_order(name: str) -> None:
    policy = make(name, 4, 1, 2, 3, 4)
    assert policy.admit([5, 6, 7]) == [1, 2, 3]
    assert 4 in policy
    assert all(key not in policy for key in (1, 2, 3))


@each_policy
def test_a_batch_comes_in_whole_or_not_at_all(name: str) -> None:
    policy = make(name, 4, 1, 2, 3, 4)
    policy.pin([2, 3])
    before = policy.figures()
    assert policy.admit([5, 6, 7]) is None
    assert policy.admit([5, 6, 7, 8, 9]) is None
    assert sorted(key for key in range(10) if key in policy) == [1, 2, 3, 4]
    assert (policy.num_pinned, policy.figures()) == (2, before)
    assert policy.admit([5, 6]) == [1, 4]


@each_policy
def test_a_batch_never_evicts_its_own_members(name: str) -> None:
    policy = make(name, 4, 1, 2, 3, 4)
    assert policy.admit([5, 6], keep={1, 3}) == [2, 4]
    policy.unpin([5, 6])
    assert policy.admit([7, 8, 9], keep={1, 3}) is None
    assert policy.admit([7, 8], keep={1, 3, 99}) == [6, 5]


@each_policy
def test_a_kept_key_that_is_pinned_is_not_counted_twice(name: str) -> None:
    policy = make(name, 3, 1, 2, 3)
    policy.pin([1])
    assert policy.admit([4, 5], keep={1}) == [2, 3]


@each_policy
def test_pinned_keys_stay_until_their_last_pin_goes(name: str) -> None:
    policy = make(name, 2, 1, 2)
    policy.pin([1])
    policy.pin([1])
    assert policy.admit([3]) == [2]
    policy.unpin([3])
    policy.unpin([1])
    assert policy.admit([4]) == [3]
    policy.unpin([4])
    policy.unpin([1])
    assert policy.admit([5, 6]) == [4, 1]


@each_policy
def test_keys_on_their_way_in_do_not_leave(name: str) -> None:
    policy = make(name, 2)
    assert policy.admit([1, 2]) == []
    assert policy.admit([3]) is None
    policy.unpin([1, 2])
    assert policy.admit([3]) == [2]


@each_policy
def test_a_chain_leaves_tail_first(name: str) -> None:
    """Stored, loaded or touched as a whole: in each case the head is the last to go."""
    stored = make(name, 4)
    assert stored.admit([1, 2, 3, 4]) == []
    stored.unpin([1, 2, 3, 4])
    assert stored.admit([5, 6, 7]) == [4, 3, 2]

    loaded = make(name, 4, 1, 2, 3, 4)
    loaded.pin([1, 2, 3])
    loaded.unpin([1, 2, 3])
    assert loaded.admit([5, 6, 7]) == [4, 3, 2]

    touched = make(name, 4, 1, 2, 3, 4)
    touched.touch([1, 2, 3, 4])
    assert touched.admit([5, 6, 7]) == [4, 3, 2]


@each_policy
def test_a_touch_passes_over_what_is_not_there(name: str) -> None:
    policy = make(name, 3, 1, 2, 3)
    policy.touch([8, 1, 9])
    assert len(policy) == 3
    assert policy.admit([4, 5]) == [2, 3]


@each_policy
def test_a_touch_of_a_pinned_key_counts_when_its_pin_goes(name: str) -> None:
    policy = make(name, 3, 1, 2, 3)
    policy.pin([1])
    policy.touch([1])
    policy.unpin([1])
    assert policy.admit([4, 5]) == [2, 3]


@each_policy
def test_a_discarded_key_is_gone_whether_pinned_or_not(name: str) -> None:
    policy = make(name, 3, 1, 2, 3)
    policy.pin([2])
    policy.discard(2)
    policy.discard(3)
    assert (len(policy), policy.num_pinned, policy.num_evictable) == (1, 0, 1)
    assert policy.admit([2, 3]) == []
    assert policy.admit([4]) == [1]


@each_policy
def test_mistakes_are_refused(name: str) -> None:
    policy = make(name, 3, 1)
    with pytest.raises(AssertionError, match="not resident"):
        policy.pin([2])
    with pytest.raises(AssertionError, match="not resident"):
        policy.discard(2)
    with pytest.raises(KeyError):
        policy.unpin([1])
    with pytest.raises(AssertionError, match="holds none"):
        make_policy(name, 0)


@each_policy
def test_eviction_never_walks_over_pinned_keys(name: str) -> None:
    """A hundred thousand pinned keys, older than all others, make an eviction no dearer than none of them."""

    def admissions_s(num_pinned: int) -> float:
        policy = make(name, num_pinned + 64, *range(num_pinned), *range(-64, 0))
        policy.pin(list(range(num_pinned)))
        started_s = time.perf_counter()
        for key in range(1_000_000, 1_002_000):
            assert policy.admit([key])
            policy.unpin([key])
        return time.perf_counter() - started_s

    few_s = min(admissions_s(10) for _ in range(3))
    many_s = min(admissions_s(100_000) for _ in range(2))
    # A walk over 100,000 keys takes a millisecond, where an admission takes a few microseconds.
    assert many_s < 20 * few_s


@each_policy
def test_a_batch_walks_once_over_what_it_keeps(name: str) -> None:
    """2,000 resident members at the old end and 2,000 to come in: linear, not four million steps."""

    def batch_s(size: int) -> float:
        policy = make(name, 2 * size, *range(2 * size))
        started_s = time.perf_counter()
        evicted = policy.admit(list(range(10**6, 10**6 + size)), keep=set(range(size)))
        taken_s = time.perf_counter() - started_s
        assert evicted == list(range(size, 2 * size))
        return taken_s

    assert min(batch_s(8_000) for _ in range(3)) < 64 * min(batch_s(500) for _ in range(3))


class PolicyMachine(RuleBasedStateMachine):
    """Any legal calls on a policy, with sets beside it that say what is resident and how often pinned."""

    NAME = ""

    @initialize(capacity=st.integers(1, 6))
    def build(self, capacity: int) -> None:
        self.policy: EvictionPolicy[int] = make_policy(self.NAME, capacity)
        self.pins: dict[int, int] = {}

    def absent(self, letters: list[int]) -> list[int]:
        return [key for key in dict.fromkeys(letters) if key not in self.pins]

    @rule(letters=st.lists(st.integers(0, 11), max_size=5), keep=st.sets(st.integers(0, 11)))
    def admit(self, letters: list[int], keep: set[int]) -> None:
        keys = self.absent(letters)
        keep -= set(keys)
        evictable = {key for key, num_pins in self.pins.items() if not num_pins} - keep
        num_leaving = max(0, len(self.pins) + len(keys) - self.policy.capacity)
        before = self.policy.figures()
        evicted = self.policy.admit(keys, keep)
        if num_leaving > len(evictable):
            assert evicted is None
            assert self.policy.figures() == before
            return
        assert evicted is not None
        assert len(evicted) == num_leaving
        assert set(evicted) <= evictable
        for key in evicted:
            del self.pins[key]
        self.pins |= dict.fromkeys(keys, 1)

    @rule(letters=st.lists(st.integers(0, 11), max_size=4, unique=True))
    def pin(self, letters: list[int]) -> None:
        keys = [key for key in letters if key in self.pins]
        self.policy.pin(keys)
        for key in keys:
            self.pins[key] += 1

    @rule(letters=st.lists(st.integers(0, 11), max_size=4, unique=True))
    def unpin(self, letters: list[int]) -> None:
        keys = [key for key in letters if self.pins.get(key)]
        self.policy.unpin(keys)
        for key in keys:
            self.pins[key] -= 1

    @rule(letters=st.lists(st.integers(0, 11), max_size=6))
    def touch(self, letters: list[int]) -> None:
        self.policy.touch(letters)

    @rule(key=st.integers(0, 11))
    def discard(self, key: int) -> None:
        if key in self.pins:
            self.policy.discard(key)
            del self.pins[key]

    @invariant()
    def the_policy_knows_what_is_resident(self) -> None:
        assert {key for key in range(12) if key in self.policy} == set(self.pins)
        num_pinned = sum(map(bool, self.pins.values()))
        assert (len(self.policy), self.policy.num_pinned) == (len(self.pins), num_pinned)
        assert len(self.policy) <= self.policy.capacity

    @invariant()
    def arc_keeps_its_bounds(self) -> None:
        if self.NAME != "arc":
            return
        figures, c = self.policy.figures(), self.policy.capacity
        assert figures["t1"] + figures["t2"] == len(self.policy)
        assert figures["t1"] + figures["b1"] <= c
        assert figures["t1"] + figures["t2"] + figures["b1"] + figures["b2"] <= 2 * c
        assert 0 <= figures["target"] <= c


class LruMachine(PolicyMachine):
    NAME = "lru"


class ArcMachine(PolicyMachine):
    NAME = "arc"


TestLruMachine = LruMachine.TestCase
TestArcMachine = ArcMachine.TestCase
