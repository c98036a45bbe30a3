"""ARC is the paper's where nothing is pinned, and keeps its bounds where something is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.tiers.policies import ArcPolicy
from tests.kvtransfer.tiers.policies.paper_arc import PaperArc


def make(capacity: int, requests: list[int]) -> ArcPolicy[int]:
    """A policy after some single requests."""
    policy = ArcPolicy[int](capacity)
    for key in requests:
        request(policy, key)
    return policy


def request(policy: ArcPolicy[int], key: int) -> list[int]:
    """What the paper calls a request: a hit is a touch, a miss comes in. The keys that left."""
    if key in policy:
        policy.touch([key])
        return []
    evicted = policy.admit([key])
    assert evicted is not None
    policy.unpin([key])
    return evicted


def lists(policy: ArcPolicy[int]) -> tuple[list[int], ...]:
    """T1, T2, B1, B2, oldest first; only where nothing is pinned."""
    return list(policy._t1), list(policy._t2), list(policy._b1), list(policy._b2)


# ---- against the paper


@given(st.integers(1, 8), st.lists(st.integers(0, 15), max_size=120))
def test_every_list_and_the_target_are_the_papers(capacity: int, requests: list[int]) -> None:
    ours, paper = ArcPolicy[int](capacity), PaperArc(capacity)
    for key in requests:
        paper.deleted.clear()
        is_hit = key in ours
        evicted = request(ours, key)
        assert paper.request(key) == is_hit
        assert evicted == paper.deleted
        assert lists(ours) == (paper.t1, paper.t2, paper.b1, paper.b2)
        assert ours.target == paper.p


def mixed_requests(seed: int) -> list[int]:
    """A hot set that moves, loops a little larger than the store, and scans: both ghost lists fill and are hit."""
    draw = random.Random(seed)
    requests: list[int] = []
    for phase in range(60):
        hot = range(10 * (phase % 5), 10 * (phase % 5) + 12)
        kind = draw.choice(("hot", "loop", "scan"))
        if kind == "hot":
            requests += [draw.choice(hot) for _ in range(60)]
        elif kind == "loop":
            requests += [*range(100, 100 + draw.randint(8, 30))] * 3
        else:
            requests += range(1000 * phase + 1000, 1000 * phase + 1000 + draw.randint(5, 60))
    return requests


@pytest.mark.parametrize("capacity", [10, 16, 25])
@pytest.mark.parametrize("seed", range(4))
def test_long_workloads_are_the_papers_too(capacity: int, seed: int) -> None:
    ours, paper = ArcPolicy[int](capacity), PaperArc(capacity)
    steps: set[float] = set()
    for key in mixed_requests(seed):
        before = ours.target
        request(ours, key)
        paper.request(key)
        assert lists(ours) == (paper.t1, paper.t2, paper.b1, paper.b2)
        assert ours.target == paper.p
        steps.add(ours.target - before)
    assert max(steps) > 1, "no hit in B1 was worth more than one"
    assert min(steps) < -1, "no hit in B2 was worth more than one"


@given(st.integers(1, 8), st.lists(st.integers(0, 15), max_size=120))
def test_the_papers_invariants_hold(capacity: int, requests: list[int]) -> None:
    """Section IV.A's conditions A.1 to A.5, and the bounds of p."""
    policy = ArcPolicy[int](capacity)
    last_use: dict[int, int] = {}
    for now, key in enumerate(requests):
        request(policy, key)
        last_use[key] = now
        t1, t2, b1, b2 = lists(policy)
        assert len({*t1, *t2, *b1, *b2}) == len(t1) + len(t2) + len(b1) + len(b2)
        assert len(t1) + len(b1) <= capacity
        assert len(t1) + len(t2) + len(b1) + len(b2) <= 2 * capacity
        if len(t1) + len(t2) < capacity:
            assert not b1
            assert not b2
        for recent, ghosts in ((t1, b1), (t2, b2)):
            ages = [last_use[key] for key in ghosts + recent]
            assert ages == sorted(ages), "a list is not in the order of last use"
        assert 0 <= policy.target <= capacity


@given(
    st.integers(4, 8),
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=3, unique=True), max_size=50),
)
def test_a_batch_is_its_keys_one_after_the_other(capacity: int, batches: list[list[int]]) -> None:
    """Where nothing of a batch is resident, so that nothing must be kept, the batch is so many requests."""
    ours, paper = ArcPolicy[int](capacity), PaperArc(capacity)
    for batch in batches:
        keys = [key for key in batch if key not in ours]
        before = set(paper.t1 + paper.t2)
        evicted = ours.admit(keys)
        assert evicted is not None
        for key in keys:
            paper.request(key)
        if before - set(paper.t1 + paper.t2) != set(evicted):
            # A key of the batch left for a later one: only the paper's single requests do that.
            assert set(keys) - set(paper.t1 + paper.t2)
            return
        assert ours.target == paper.p
        assert list(ours._b1) == paper.b1
        assert list(ours._b2) == paper.b2
        for key in keys:
            ours.unpin([key])


# ---- each rule by itself


def test_a_second_use_moves_a_key_to_t2_also_while_it_is_pinned() -> None:
    policy = make(4, [1, 2])
    policy.touch([1])
    assert lists(policy) == ([2], [1], [], [])
    policy.pin([2])
    policy.touch([2])
    assert (policy.figures()["t1"], policy.figures()["t2"]) == (0, 2)
    policy.unpin([2])
    assert lists(policy) == ([], [1, 2], [], [])


def test_a_hit_in_b1_raises_the_target_and_enters_t2() -> None:
    policy = make(2, [1, 2, 1, 3])  # T1 3, T2 1, B1 2
    assert lists(policy) == ([3], [1], [2], [])
    assert request(policy, 2) == [1]  # |T1| = p = 1, and 2 is not in B2: T2 gives
    assert lists(policy) == ([3], [2], [], [1])
    assert policy.target == 1.0
    assert policy.figures()["b1_hits_total"] == 1


def test_a_hit_in_b2_lowers_the_target_and_a_tie_goes_to_t1() -> None:
    policy = make(2, [1, 2, 1, 3, 2])  # T1 3, T2 2, B2 1, p 1
    assert request(policy, 1) == [3]  # p falls to 0, |T1| = 1 exceeds it
    assert policy.target == 0.0
    assert lists(policy) == ([], [2, 1], [3], [])
    assert policy.figures()["b2_hits_total"] == 1


@pytest.mark.parametrize("comes_from_b2", [True, False])
def test_the_tie_rule_is_for_hits_in_b2_only(comes_from_b2: bool) -> None:
    """|T1| = p after adaptation: a key from B2 evicts from T1, a new one from T2."""
    policy = make(4, [1, 2, 3, 1, 2, 3, 4, 5])  # T1 5, T2 1 2 3, B1 4
    request(policy, 4)  # p 1: T2 gives 1
    assert lists(policy) == ([5], [2, 3, 4], [], [1])
    policy._target = 2.0 if comes_from_b2 else 1.0  # 1 when the key is taken in
    assert request(policy, 1 if comes_from_b2 else 9) == ([5] if comes_from_b2 else [2])


def test_adaptation_is_by_the_ratio_of_the_ghosts() -> None:
    policy = make(4, [1, 2, 3, 4, 1, 2, 3, 4])  # all in T2
    for key in (5, 6, 7, 8):
        request(policy, key)
    t1, t2, b1, b2 = map(len, lists(policy))
    assert (t1, t2, b1, b2) == (1, 3, 3, 1)
    policy._target = 4.0
    request(policy, next(iter(policy._b2)))
    assert policy.target == 1.0  # 4 - 3/1


def test_a_store_of_new_keys_only_leaves_no_ghosts_beyond_the_capacity() -> None:
    policy = make(4, list(range(100)))
    figures = policy.figures()
    assert (figures["t1"], figures["b1"], figures["t2"], figures["b2"]) == (4, 0, 0, 0)


# ---- what the paper does not have


def test_the_other_list_gives_when_the_preferred_one_is_all_pinned() -> None:
    policy = make(4, [1, 2, 3, 4, 3, 4])  # T1 1 2, T2 3 4, p 0: T1 is preferred
    policy.pin([1, 2])
    assert policy.admit([5]) == [3]
    assert list(policy._b2) == [3]
    policy.unpin([1, 2])
    policy.unpin([5])

    policy = make(4, [1, 2, 3, 4, 3, 4])
    policy._target = 4.0  # T2 is preferred
    policy.pin([3, 4])
    assert policy.admit([5]) == [1]
    assert list(policy._b1) == [1]


def test_a_store_with_all_of_t2_pinned_or_empty_takes_from_t1() -> None:
    policy = make(3, [1, 2, 3])
    policy._target = 3.0
    assert policy.admit([4, 5, 6]) == [1, 2, 3]


def test_a_key_that_is_discarded_is_no_ghost_and_leaves_room() -> None:
    policy = make(2, [1, 2])
    policy.discard(1)
    assert request(policy, 3) == []
    assert lists(policy) == ([2, 3], [], [], [])
    request(policy, 4)
    assert request(policy, 1) == [3]
    assert policy.figures()["b1_hits_total"] == 0


def test_a_ghost_that_is_touched_changes_nothing_until_it_comes_in() -> None:
    policy = make(2, [1, 2, 1, 3])
    before = lists(policy)
    policy.touch([2, 2])
    assert (lists(policy), policy.target) == (before, 0.0)
