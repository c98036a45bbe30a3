"""Block tables change by one set of rules, in every KV group alike."""

from __future__ import annotations

from typing import Any

import pytest

from core.blocks import BlockState
from core.ids import BlockId
from engine.kvcache.block_table import BlockTable
from engine.kvcache.manager import KVManager
from engine.sequence import Sequence
from tests.support.kv import BLOCK_SIZE, ROOT, make_pool
from tests.support.sequences import make_sequence


def make_manager(num_usable: int = 20, num_groups: int = 1, caching: bool = True) -> KVManager:
    pool = make_pool(num_usable, num_groups=num_groups)
    return KVManager(pool, BLOCK_SIZE, num_groups, ROOT if caching else None)


def make_attached(manager: KVManager, **settings: Any) -> Sequence:
    sequence = make_sequence(num_groups=manager.num_groups, **settings)
    manager.attach(sequence)
    return sequence


def compute(manager: KVManager, sequence: Sequence) -> None:
    """Everything that a step over all remaining tokens does to the tables."""
    start = sequence.num_computed_tokens
    assert manager.prepare_write(sequence, sequence.num_remaining_tokens, [])
    sequence.num_computed_tokens = sequence.num_tokens
    manager.commit_full(sequence, start, sequence.num_tokens)


def check(manager: KVManager, *sequences: Sequence) -> None:
    tables = [s.block_table for s in sequences]
    manager.pool.check_integrity([ids for table in tables for ids in (*table.groups, table.spares)])


# ---------------------------------------------------------------- tables


def test_a_table_is_cut_tail_first_over_all_groups() -> None:
    table = BlockTable(2)
    for row in ([1, 2], [3, 4], [5, 6]):
        table.append([BlockId(block) for block in row])
    table.spares = [BlockId(7)]
    assert (len(table), table.num_held_blocks) == (3, 7)
    assert table.cut(1) == [5, 6, 3, 4]
    assert [table.ids(group) for group in (0, 1)] == [[1], [2]]
    assert table.take_spares() == [7]
    assert table.num_held_blocks == 2
    with pytest.raises(AssertionError, match="1 blocks for 2 groups"):
        table.append([BlockId(9)])


# ---------------------------------------------------------------- taking


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_capacity_and_needs_count_every_group(num_groups: int) -> None:
    manager = make_manager(7, num_groups)
    assert manager.capacity_tokens == 7 // num_groups * 16
    assert [manager.num_blocks_for(n) for n in (0, 1, 16, 17)] == [
        0,
        num_groups,
        num_groups,
        2 * num_groups,
    ]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_prompt_takes_cached_blocks_first_in_every_group(num_groups: int) -> None:
    manager = make_manager(20, num_groups)
    first = make_attached(manager, prompt=range(100, 150))
    assert manager.take_all(first, 50)
    compute(manager, first)
    second = make_attached(manager, prompt=(*range(100, 140), 1, 2, 3))
    assert manager.count_cached_tokens(second) == 32
    assert manager.take_all(second, 43)
    assert second.num_computed_tokens == 40, "eight of a block that ends otherwise"
    for ours, theirs in zip(second.block_table.groups, first.block_table.groups, strict=True):
        assert ours[:3] == theirs[:3]
        assert len(ours) == 3
    assert len(second.block_table.spares) == num_groups
    check(manager, first, second)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("is_running", [True, False])
def test_a_block_of_which_the_beginning_is_wanted_is_copied(
    num_groups: int, is_running: bool
) -> None:
    manager = make_manager(20, num_groups)
    first = make_attached(manager, prompt=range(100, 148))
    manager.take_all(first, 48)
    compute(manager, first)
    theirs = [ids[2] for ids in first.block_table.groups]
    if not is_running:
        manager.release(first)
    second = make_attached(manager, prompt=(*range(100, 140), *range(20)))
    assert manager.take_all(second, 61)
    copies: list[tuple[BlockId, BlockId]] = []
    assert manager.prepare_write(second, second.num_remaining_tokens, copies)
    own = [ids[2] for ids in second.block_table.groups]
    assert copies == list(zip(theirs, own, strict=True))
    assert not set(own) & set(theirs)
    assert second.block_table.spares == []
    assert manager.count_cached_tokens(first) == 48, "the other is found as before"
    check(manager, second, *([first] if is_running else []))


def test_a_prompt_that_is_cached_whole_is_computed_from_its_last_token() -> None:
    manager = make_manager()
    for _ in range(2):
        sequence = make_attached(manager, prompt=range(100, 148))
        assert manager.take_all(sequence, 49)
        compute(manager, sequence)
        manager.release(sequence)
    again = make_attached(manager, prompt=range(100, 148))
    assert manager.take_all(again, 49)
    assert again.num_computed_tokens == 47
    check(manager, again)


def test_a_beginning_is_left_where_its_copy_does_not_fit() -> None:
    manager = make_manager(3)
    first = make_attached(manager, prompt=range(100, 132))
    manager.take_all(first, 32)
    compute(manager, first)
    manager.release(first)
    second = make_attached(manager, prompt=(*range(100, 120), *range(28)))
    assert manager.take_all(second, 48)
    assert second.num_computed_tokens == 16
    assert second.block_table.num_held_blocks == 3
    check(manager, second)


def test_beginnings_are_found_behind_equal_tokens_and_salts_only() -> None:
    manager = make_manager()
    first = make_attached(manager, prompt=range(100, 132))
    manager.take_all(first, 32)
    compute(manager, first)
    for prompt, salt in (((7, *range(101, 132)), ""), (range(100, 130), "tenant")):
        other = make_attached(manager, prompt=prompt, cache_salt=salt)
        assert manager.take_all(other, other.num_tokens)
        assert other.num_computed_tokens == 0
        manager.release(other)
    check(manager, first)


def test_a_head_counts_only_where_all_groups_have_it() -> None:
    manager = make_manager(20, 2)
    first = make_attached(manager, prompt=range(100, 140))
    manager.take_all(first, 40)
    compute(manager, first)
    manager.release(first)
    # Evict the second block of group 1 only: the tail's rows are released group by group.
    tail_of_group_1 = [
        b for b in manager.pool.free_order() if manager.pool.life.state(b) is BlockState.CACHED
    ]
    manager.pool.allocate(manager.pool.num_free - len(tail_of_group_1) + 1)
    second = make_attached(manager, prompt=range(100, 140))
    assert manager.count_cached_tokens(second) == 16


def test_taking_is_all_or_none_and_counts_what_the_queue_would_lose() -> None:
    manager = make_manager(4)
    first = make_attached(manager, prompt=range(100, 133))
    assert manager.take_all(first, 33)
    compute(manager, first)
    manager.release(first)
    second = make_attached(manager, prompt=(*range(100, 132), *range(30)))
    assert manager.fits(second, 64)
    assert not manager.fits(second, 65), (
        "two cached blocks leave the queue, three fresh ones are not there"
    )
    assert not manager.take_all(second, 65)
    assert second.block_table.num_held_blocks == 0
    assert manager.take_all(second, 64)
    assert manager.pool.num_free == 0
    check(manager, second)


def test_extending_takes_spares_first() -> None:
    manager = make_manager(4)
    sequence = make_attached(manager)
    assert manager.add_spares(sequence, 2)
    assert sequence.block_table.spares == [1, 2]
    assert manager.extend(sequence, 40)
    assert sequence.block_table.ids() == [1, 2, 3]
    assert sequence.block_table.spares == []
    assert not manager.extend(sequence, 100)
    assert len(sequence.block_table) == 3
    assert not manager.add_spares(sequence, 2)
    check(manager, sequence)


# ---------------------------------------------------------------- writing


def test_blocks_are_filling_only_from_their_first_write() -> None:
    manager = make_manager()
    sequence = make_attached(manager, prompt=40)
    manager.take_all(sequence, 40)
    for num_tokens, expected in ((10, "FRR"), (6, "FRR"), (17, "FFF")):
        assert manager.prepare_write(sequence, num_tokens, [])
        sequence.num_computed_tokens += num_tokens
        states = [manager.pool.life.state(block) for block in sequence.block_table.ids()]
        assert "".join(state.name[0] for state in states) == expected


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_shared_tail_is_copied_in_every_group(num_groups: int) -> None:
    manager = make_manager(10, num_groups)
    parent = make_attached(manager, prompt=20, n=2, temperature=1.0)
    manager.take_all(parent, 20)
    compute(manager, parent)
    fork = parent.fork(1, 5)
    parent.token_ids.append(6)
    manager.share(parent, fork)
    shared = [ids[1] for ids in parent.block_table.groups]
    copies: list[tuple[BlockId, BlockId]] = []
    assert manager.prepare_write(fork, 1, copies)
    own = [ids[1] for ids in fork.block_table.groups]
    assert copies == list(zip(shared, own, strict=True))
    assert [ids[0] for ids in fork.block_table.groups] == [
        ids[0] for ids in parent.block_table.groups
    ]
    assert manager.prepare_write(parent, 1, copies)
    assert len(copies) == num_groups, "the last holder writes in place"
    check(manager, parent, fork)


def test_a_write_that_lacks_blocks_changes_nothing() -> None:
    manager = make_manager(2)
    parent = make_attached(manager, prompt=20, n=2, temperature=1.0)
    manager.take_all(parent, 20)
    compute(manager, parent)
    fork = parent.fork(1, 5)
    parent.token_ids.append(6)
    manager.share(parent, fork)
    copies: list[tuple[BlockId, BlockId]] = []
    assert not manager.prepare_write(fork, 1, copies)
    assert copies == []
    assert fork.block_table.ids() == parent.block_table.ids()
    manager.release(parent)
    assert manager.prepare_write(fork, 1, copies)
    assert copies == []
    check(manager, fork)


# ---------------------------------------------------------------- giving back


def test_release_gives_back_the_tail_before_the_head() -> None:
    manager = make_manager(6)
    sequence = make_attached(manager, prompt=40)
    manager.take_all(sequence, 40)
    compute(manager, sequence)
    manager.release(sequence, keep_first=1)
    assert sequence.block_table.ids() == [1]
    assert sequence.num_computed_tokens == 16
    assert manager.pool.free_order() == [3, 4, 5, 6, 2]
    manager.release(sequence)
    assert manager.pool.free_order() == [3, 4, 5, 6, 2, 1]
    assert sequence.num_computed_tokens == 0


def test_without_caching_full_blocks_stay_filling_and_go_back_empty() -> None:
    manager = make_manager(4, caching=False)
    sequence = make_attached(manager, prompt=40)
    manager.take_all(sequence, 40)
    compute(manager, sequence)
    states = [manager.pool.life.state(block) for block in sequence.block_table.ids()]
    assert states == [BlockState.FILLING] * 3
    manager.release(sequence)
    assert manager.pool.free_order() == [3, 2, 1, 4]
    assert manager.pool.take_events() == []


def test_received_blocks_are_committed_up_to_the_partly_filled_tail() -> None:
    manager = make_manager()
    sequence = make_attached(manager, prompt=40)
    manager.extend(sequence, 40)
    manager.pool.begin_fill(sequence.block_table.ids()[1])
    manager.accept_received(sequence, 40)
    states = [manager.pool.life.state(block) for block in sequence.block_table.ids()]
    assert states == [BlockState.COMMITTED, BlockState.COMMITTED, BlockState.FILLING]
    assert sequence.num_computed_tokens == 40
    manager.accept_received(sequence, 40)
    check(manager, sequence)
