"""Blocks are found by how they begin, each content once, the longest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import HASH_BYTES, BlockHash
from engine.kvcache.beginnings import Beginnings
from engine.kvcache.chain import BlockContent

PARENTS = [BlockHash(bytes([number]) * HASH_BYTES) for number in range(2)]
tokens = st.lists(st.integers(0, 2), min_size=4, max_size=4).map(tuple)


def content(parent: BlockHash, token_ids: tuple[int, ...]) -> BlockContent:
    key = BlockHash(parent[: HASH_BYTES - 4] + bytes(token_ids))
    return BlockContent((key,), parent, token_ids)


def shared(some: tuple[int, ...], others: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(some), len(others)) and some[count] == others[count]:
        count += 1
    return count


def test_the_longest_beginning_is_found_behind_its_own_parent() -> None:
    beginnings = Beginnings()
    near, far = content(PARENTS[0], (1, 2, 3, 9)), content(PARENTS[0], (1, 2, 8, 8))
    elsewhere = content(PARENTS[1], (1, 2, 3, 4))
    for one in (near, far, elsewhere):
        beginnings.add(one)
    assert beginnings.longest(PARENTS[0], (1, 2, 3, 4)) == (near, 3)
    assert beginnings.longest(PARENTS[0], (1, 2)) == (far, 2), "the latest of equals"
    assert beginnings.longest(PARENTS[1], (1, 2, 3, 4)) == (elsewhere, 4)
    assert beginnings.longest(PARENTS[0], (7, 2, 3)) == (None, 0)


def test_what_is_removed_is_not_found() -> None:
    beginnings = Beginnings()
    one, other = content(PARENTS[0], (1, 2, 3, 9)), content(PARENTS[0], (1, 5, 5, 5))
    beginnings.add(one)
    beginnings.add(other)
    beginnings.remove(one.key)
    assert beginnings.longest(PARENTS[0], (1, 2, 3)) == (other, 1)
    beginnings.remove(other.key)
    assert beginnings.longest(PARENTS[0], (1, 2, 3)) == (None, 0)
    assert len(beginnings) == 0


def test_of_many_that_begin_alike_only_the_latest_are_tried() -> None:
    beginnings = Beginnings()
    best = content(PARENTS[0], (1, 2, 3, 4))
    beginnings.add(best)
    for token_id in range(10, 25):
        beginnings.add(content(PARENTS[0], (1, token_id, 0, 0)))
    assert beginnings.longest(PARENTS[0], (1, 2, 3, 4)) == (best, 4)
    beginnings.add(content(PARENTS[0], (1, 99, 0, 0)))
    assert beginnings.longest(PARENTS[0], (1, 2, 3, 4))[1] == 1


@given(
    st.lists(st.tuples(st.sampled_from(PARENTS), tokens), max_size=12, unique=True),
    st.sampled_from(PARENTS),
    st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
)
def test_no_other_content_shares_more(
    held: list[tuple[BlockHash, tuple[int, ...]]], parent: BlockHash, wanted: tuple[int, ...]
) -> None:
    beginnings = Beginnings()
    for own, token_ids in held:
        beginnings.add(content(own, token_ids))
    found, count = beginnings.longest(parent, wanted)
    counts = [shared(token_ids, wanted) for own, token_ids in held if own == parent]
    assert count == max(counts, default=0)
    assert (found is None) == (count == 0)
    assert found is None or shared(found.token_ids, wanted) == count
