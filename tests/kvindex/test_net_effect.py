"""Merged batches against events applied one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.events import CacheEvent, EventKind, Tier
from kvindex.base import LOCAL_TIERS
from kvindex.net_effect import ALL_TIERS, TIER_BITS, net_effect
from tests.support.index_values import cleared, create_chain, removed, stored

HASHES = create_chain(6)

State = dict[bytes, int]

events = st.builds(
    CacheEvent,
    kind=st.sampled_from(EventKind),
    tier=st.sampled_from([*Tier, None]),
    hashes=st.lists(st.sampled_from(HASHES), max_size=4, unique=True).map(tuple),
)


def one_by_one(state: State, batch: list[CacheEvent]) -> State:
    after = dict(state)
    for event in batch:
        bits = ALL_TIERS if event.tier is None else TIER_BITS.get(event.tier, 0)
        named = HASHES if event.kind is EventKind.CLEARED else event.hashes
        for block_hash in named:
            before = after.get(block_hash, 0)
            after[block_hash] = before | bits if event.kind is EventKind.STORED else before & ~bits
    return {block_hash: bits for block_hash, bits in after.items() if bits}


def merged(state: State, batch: list[CacheEvent]) -> State:
    effect = net_effect(batch)
    after = {block_hash: bits & ~effect.cleared for block_hash, bits in state.items()}
    for (set_bits, dropped), hashes in effect.groups.items():
        for block_hash in hashes:
            after[block_hash] = after.get(block_hash, 0) & ~dropped | set_bits
    return {block_hash: bits for block_hash, bits in after.items() if bits}


@given(st.lists(events, max_size=8), st.lists(events, max_size=12))
def test_merging_changes_nothing(before: list[CacheEvent], batch: list[CacheEvent]) -> None:
    state = one_by_one({}, before)
    assert merged(state, batch) == one_by_one(state, batch)


@given(st.lists(events, max_size=12), st.integers(0, 12))
def test_a_batch_over_a_state_that_holds_its_head_gives_the_same(
    batch: list[CacheEvent], num_applied: int
) -> None:
    state = one_by_one({}, batch[:num_applied])
    assert merged(state, batch) == one_by_one({}, batch)


def test_a_hash_is_named_once() -> None:
    batch = [stored(HASHES), removed(HASHES[2:]), cleared(Tier.HOST), stored(HASHES[3:], Tier.HOST)]
    named = [h for hashes in net_effect(batch).groups.values() for h in hashes]
    assert sorted(named) == sorted(HASHES)


def test_every_local_tier_has_a_bit_of_its_own() -> None:
    assert set(TIER_BITS) == set(LOCAL_TIERS)
    assert sorted(TIER_BITS.values()) == [1, 2, 4]
