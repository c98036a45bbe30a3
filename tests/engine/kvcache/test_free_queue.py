"""The free queue keeps order, and any block leaves from the middle."""

from __future__ import annotations

import pytest

from core.ids import NULL_BLOCK, BlockId
from engine.kvcache.free_queue import FreeQueue


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_a_new_queue_holds_all_but_the_null_block_in_order() -> None:
    queue = FreeQueue(5)
    assert list(queue) == [1, 2, 3, 4]
    assert len(queue) == 4
    assert NULL_BLOCK not in queue
    queue.check_integrity()


@pytest.mark.parametrize(("block", "left"), [(1, [2, 3]), (2, [1, 3]), (3, [1, 2])])
def test_any_block_leaves_in_place(block: int, left: list[int]) -> None:
    queue = FreeQueue(4)
    queue.remove(BlockId(block))
    assert list(queue) == left
    assert BlockId(block) not in queue
    queue.check_integrity()


def test_blocks_come_back_at_either_end() -> None:
    queue = FreeQueue(6)
    assert [queue.pop_head() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert len(queue) == 0
    queue.append(BlockId(4))
    queue.prepend(ids(2, 5))
    queue.append(BlockId(1))
    assert list(queue) == [2, 5, 4, 1]
    queue.check_integrity()


def test_misuse_is_refused() -> None:
    queue = FreeQueue(3)
    with pytest.raises(AssertionError, match="free queue already"):
        queue.append(BlockId(1))
    queue.remove(BlockId(1))
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(BlockId(1))
    with pytest.raises(AssertionError, match="null block"):
        queue.remove(NULL_BLOCK)
    queue.pop_head()
    with pytest.raises(AssertionError, match="empty"):
        queue.pop_head()


@pytest.mark.peer_vectors
def test_the_orders_of_a_queue_of_ten() -> None:
    """Pop, remove from the middle, append: the operations a peer's queue test makes, in its order."""
    queue = FreeQueue(11)
    assert queue.pop_head() == 1
    queue.remove(BlockId(5))
    queue.append(BlockId(1))
    queue.append(BlockId(5))
    assert list(queue) == [2, 3, 4, 6, 7, 8, 9, 10, 1, 5]
    assert len(queue) == 10
