"""Allocation order, sharing, content and events of the block pool, case by case."""

from __future__ import annotations

import pytest

from core.blocks import BlockState
from core.events import CacheEvent, EventKind, Tier
from core.ids import NULL_BLOCK, BlockId, SessionId
from engine.kvcache.block_pool import HeldContent
from engine.kvcache.chain import BlockContent
from tests.support.kv import chain_of, commit_chain, keys_of, make_pool, store_chain


def states(pool, blocks) -> list[BlockState]:
    return [pool.life.state(block) for block in blocks]


def test_blocks_come_from_the_head_reserved_and_in_a_new_generation() -> None:
    pool = make_pool(4)
    assert pool.allocate(2) == [1, 2]
    assert states(pool, [1, 2]) == [BlockState.RESERVED] * 2
    assert pool.life.generation(BlockId(1)) == 1
    assert (pool.num_free, pool.num_held, pool.usage) == (2, 2, 0.5)


def test_the_highest_block_that_was_ever_used_is_known() -> None:
    pool = make_pool(4)
    assert pool.num_ever_used == 1, "the null block"
    pool.release(pool.allocate(3) or [])
    assert pool.num_ever_used == 4
    assert pool.allocate(1) == [1]
    assert pool.num_ever_used == 4


def test_allocation_is_all_or_none() -> None:
    pool = make_pool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) is None


def test_the_null_block_is_never_given_out_nor_writable() -> None:
    pool = make_pool(2)
    assert NULL_BLOCK not in (pool.allocate(2) or [])
    with pytest.raises(AssertionError):
        pool.life.grant(SessionId(1), 0, [NULL_BLOCK])
    with pytest.raises(AssertionError):
        pool.release([NULL_BLOCK])


def test_blocks_without_content_are_reused_first() -> None:
    pool = make_pool(6)
    stored = store_chain(pool, 0, 1)  # blocks 1, 2
    scratch = pool.allocate(2)  # blocks 3, 4
    pool.release(stored[::-1])
    pool.release(scratch)
    assert pool.free_order() == [3, 4, 5, 6, 2, 1]
    assert states(pool, [1, 2, 3]) == [BlockState.CACHED, BlockState.CACHED, BlockState.FREE]


def test_a_child_is_evicted_before_its_parent() -> None:
    pool = make_pool(3)
    pool.release(store_chain(pool, 0, 1, 2)[::-1])
    contents = chain_of(0, 1, 2)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.match(contents) == [1, 2, 3][:left]


def test_touching_a_head_moves_it_behind_others() -> None:
    pool = make_pool(4)
    pool.release(store_chain(pool, 0, 1)[::-1])
    pool.release(store_chain(pool, 2, 3)[::-1])
    assert pool.free_order() == [2, 1, 4, 3]
    (head,) = pool.match(chain_of(0))
    pool.acquire(head)
    assert pool.life.state(head) is BlockState.COMMITTED
    assert pool.free_order() == [2, 4, 3]
    pool.release([head])
    assert pool.free_order() == [2, 4, 3, 1]


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = make_pool(2)
    (block,) = pool.allocate(1) or []
    pool.begin_fill(block)
    pool.acquire(block)
    assert pool.references(block) == 2
    pool.release([block])
    assert pool.life.state(block) is BlockState.FILLING
    pool.release([block])
    assert pool.life.state(block) is BlockState.FREE
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release([block])


def test_only_committed_and_cached_blocks_are_found() -> None:
    pool = make_pool(3)
    blocks, contents = pool.allocate(2) or [], chain_of(0, 1)
    pool.begin_fill(blocks[0])
    assert pool.match(contents) == []
    pool.commit(blocks[0], contents[0])
    assert pool.match(contents) == [1]
    pool.release(blocks[::-1])
    assert pool.match(contents) == [1]


def test_equal_hashes_of_other_tokens_are_not_believed() -> None:
    pool = make_pool(2)
    (content,) = chain_of(5)
    commit_chain(pool, pool.allocate(1) or [], [content])
    forged_tokens = content._replace(token_ids=(6,) * 16)
    forged_parent = content._replace(parent=content.key)
    assert pool.match([forged_tokens]) == []
    assert pool.match([forged_parent]) == []
    assert pool.match([content]) == [1]


def test_a_beginning_is_believed_of_blocks_with_its_own_content_only() -> None:
    pool = make_pool(3)
    (content,) = chain_of(5)
    forged = content._replace(token_ids=(6,) * 16)
    first, second = pool.allocate(2) or []
    for block, own in ((first, content), (second, forged)):
        pool.begin_fill(block)
        pool.commit(block, own)
    tokens = content.token_ids[:9]
    assert pool.match_beginning(content.parent, tokens) == (first, 9)
    pool.release([first])
    pool.release(pool.allocate(2) or [])  # its content is gone
    assert pool.match_beginning(content.parent, tokens) == (NULL_BLOCK, 0)
    pool.release([second])
    pool.release(pool.allocate(3) or [])
    assert pool.match_beginning(content.parent, tokens) == (NULL_BLOCK, 0)
    pool.check_integrity([])


def test_groups_have_their_own_keys() -> None:
    pool = make_pool(4, num_groups=2)
    (content,) = chain_of(0)
    blocks = pool.allocate(2) or []
    for group, block in enumerate(blocks):
        pool.begin_fill(block)
        pool.commit(block, content, group)
    assert [pool.match([content], group) for group in (0, 1)] == [[1], [2]]
    assert pool.take_events() == [stored(content)], "only group 0 is published"
    assert pool.snapshot() == [content.key]
    pool.release(blocks)
    pool.check_integrity([])


def stored(*contents: BlockContent, tokens: bool = False) -> CacheEvent:
    return CacheEvent(
        EventKind.STORED,
        Tier.DEVICE,
        tuple(keys_of(contents)),
        contents[0].parent,
        tuple(token for content in contents for token in content.token_ids) if tokens else (),
    )


def removed(*contents: BlockContent) -> CacheEvent:
    return CacheEvent(EventKind.REMOVED, Tier.DEVICE, tuple(keys_of(contents)))


def test_a_chain_is_one_stored_event_and_two_chains_are_two() -> None:
    pool = make_pool(6)
    store_chain(pool, 0, 1, 2)
    store_chain(pool, 3)
    assert pool.take_events() == [stored(*chain_of(0, 1, 2)), stored(*chain_of(3))]
    assert pool.take_events() == []


def test_events_may_carry_tokens() -> None:
    pool = make_pool(2, events_with_token_ids=True)
    store_chain(pool, 0, 1)
    assert pool.take_events() == [stored(*chain_of(0, 1), tokens=True)]


def test_a_removal_is_told_when_the_last_copy_leaves() -> None:
    pool = make_pool(2)
    (content,) = chain_of(0)
    first, second = store_chain(pool, 0), store_chain(pool, 0)
    assert pool.take_events() == [stored(content)]
    assert pool.match([content]) == first
    pool.release(first)
    pool.release(second)
    pool.allocate(1)
    assert pool.take_events() == []
    assert pool.match([content]) == second
    pool.allocate(1)
    assert pool.take_events() == [removed(content)]
    assert pool.snapshot() == []


def test_removals_in_a_row_are_one_event() -> None:
    pool = make_pool(3)
    pool.release(store_chain(pool, 0, 1, 2)[::-1])
    pool.take_events()
    pool.allocate(2)
    contents = chain_of(0, 1, 2)
    assert pool.take_events() == [removed(contents[2], contents[1])]


def test_reset_forgets_what_nobody_uses() -> None:
    pool = make_pool(4)
    used, unused = store_chain(pool, 0), store_chain(pool, 1, 2)
    pool.release(unused[::-1])
    pool.take_events()
    assert pool.reset_prefix_cache() == 2
    contents = chain_of(1, 2)
    assert pool.take_events() == [removed(contents[1], contents[0])]
    assert pool.match(chain_of(0)) == used
    pool.release(used)
    assert pool.reset_prefix_cache() == 1
    assert [event.kind for event in pool.take_events()] == [EventKind.CLEARED]
    assert pool.reset_prefix_cache() == 0
    assert pool.take_events() == []
    pool.check_integrity([])


def test_a_block_given_up_under_a_writer_is_set_aside_until_the_writer_leaves() -> None:
    pool = make_pool(2)
    (block,) = pool.allocate(1) or []
    permit = pool.life.grant(SessionId(1), 0, [block])
    assert pool.life.enter(permit, block)
    pool.life.revoke(permit)
    pool.release([block])
    assert pool.life.state(block) is BlockState.QUARANTINED
    assert (pool.num_free, pool.num_held, pool.num_quarantined) == (1, 0, 1)
    assert not pool.settle(block)
    assert not pool.life.enter(permit, block)
    assert pool.life.leave(block)
    assert pool.settle(block)
    assert pool.free_order() == [1, 2]
    assert not pool.settle(block)
    pool.check_integrity([])


def test_all_quarantined_blocks_of_a_dead_writer_come_back() -> None:
    pool = make_pool(3)
    blocks = pool.allocate(3) or []
    permit = pool.life.grant(SessionId(1), 0, blocks)
    for block in blocks[:2]:
        assert pool.life.enter(permit, block)
    pool.release(blocks)
    assert pool.settle_all() == 0
    for block in blocks:
        pool.life.expel(block)
    assert pool.settle_all() == 2
    assert pool.num_free == 3
    pool.check_integrity([])


def test_a_block_with_a_writer_inside_cannot_be_committed() -> None:
    pool = make_pool(1)
    (block,) = pool.allocate(1) or []
    permit = pool.life.grant(SessionId(1), 0, [block])
    pool.begin_fill(block)
    assert pool.life.enter(permit, block)
    with pytest.raises(AssertionError, match="writer inside"):
        pool.commit(block, chain_of(0)[0])
    assert pool.match(chain_of(0)) == []
    pool.life.leave(block)
    pool.commit(block, chain_of(0)[0])
    assert pool.match(chain_of(0)) == [block]


def test_integrity_names_a_holder_that_the_pool_does_not_know() -> None:
    pool = make_pool(2)
    pool.allocate(1)
    pool.check_integrity([[BlockId(1)]])
    with pytest.raises(AssertionError, match="block 1: 1 references, 2 holders"):
        pool.check_integrity([[BlockId(1)], [BlockId(1)]])


@pytest.mark.peer_vectors
def test_the_free_order_after_two_sequences_that_share_a_prefix() -> None:
    """11 blocks, null among them; 55 tokens take [1, 2, 3, 4]; a second one shares [1, 2, 3] and takes [5]."""
    pool = make_pool(10)
    first = store_chain(pool, 0, 1, 2) + (pool.allocate(1) or [])
    assert first == [1, 2, 3, 4]
    shared = pool.match(chain_of(0, 1, 2))
    assert shared == [1, 2, 3]
    for block in shared:
        pool.acquire(block)
    second = shared + (pool.allocate(1) or [])
    assert second == [1, 2, 3, 5]
    pool.release(first[::-1])
    assert pool.free_order() == [4, 6, 7, 8, 9, 10]
    pool.release(second[::-1])
    assert pool.free_order() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_what_was_committed_is_told_once_and_only_while_it_is_there() -> None:
    pool = make_pool(4)
    store_chain(pool, 9)
    pool.note_committed()
    blocks = store_chain(pool, 0, 1)
    contents = chain_of(0, 1)
    assert pool.take_committed() == [
        HeldContent(block, 0, content) for block, content in zip(blocks, contents, strict=True)
    ]
    assert pool.take_committed() == []
    lost = store_chain(pool, 5)
    pool.release(lost)
    pool.reset_prefix_cache()
    assert pool.take_committed() == []


def test_what_would_be_evicted_next_is_told_in_that_order() -> None:
    pool = make_pool(5)
    blocks = store_chain(pool, 0, 1)
    pool.release(blocks[::-1])
    parent, child = chain_of(0, 1)
    assert pool.free_order() == [3, 4, 5, 2, 1]
    assert pool.next_evicted(3) == []
    assert pool.next_evicted(5) == [HeldContent(2, 0, child), HeldContent(1, 0, parent)]
    assert pool.holds(HeldContent(2, 0, child))
    assert not pool.holds(HeldContent(2, 0, parent))


def test_what_is_lent_keeps_its_place_and_is_passed_over() -> None:
    pool = make_pool(4)
    blocks = store_chain(pool, 0, 1, 2)
    pool.lend(blocks[2])
    pool.release(blocks[::-1])
    assert pool.free_order() == [4, 3, 2, 1]
    assert (pool.num_free, pool.num_lent, pool.num_held, pool.usage) == (3, 1, 0, 0.25)
    pool.check_integrity([])
    assert pool.allocate(4) is None
    assert pool.allocate(2) == [4, 2]  # not 3, which is read
    pool.take_back(blocks[2])
    assert (pool.num_free, pool.num_lent) == (2, 0)
    assert pool.allocate(1) == [3]


def test_a_lent_block_is_found_and_used_like_any_other() -> None:
    pool = make_pool(3)
    blocks = store_chain(pool, 0)
    pool.lend(blocks[0])
    pool.lend(blocks[0])
    pool.release(blocks)
    assert pool.match(chain_of(0)) == blocks
    pool.acquire(blocks[0])
    assert (pool.num_free, pool.num_lent) == (2, 0)
    pool.release(blocks)
    pool.take_back(blocks[0])
    assert (pool.num_free, pool.num_lent) == (2, 1)
    pool.take_back(blocks[0])
    assert (pool.num_free, pool.num_lent) == (3, 0)


def test_what_is_forgotten_while_it_is_lent_is_not_used_anew_before_it_is_back() -> None:
    pool = make_pool(2)
    blocks = store_chain(pool, 0)
    pool.lend(blocks[0])
    pool.release(blocks)
    assert pool.reset_prefix_cache() == 1
    assert pool.match(chain_of(0)) == []
    assert pool.allocate(2) is None
    pool.check_integrity([])
    pool.take_back(blocks[0])
    assert pool.allocate(2) == [2, 1]


def test_what_is_lent_takes_nothing_from_those_that_can_be_allocated() -> None:
    pool = make_pool(4)
    blocks = store_chain(pool, 0, 1)
    pool.lend(blocks[0])
    pool.release(blocks[::-1])
    before = pool.num_free
    assert pool.num_cached_among(blocks) == 1
    for block in blocks:
        pool.acquire(block)
    assert before - pool.num_free == 1
