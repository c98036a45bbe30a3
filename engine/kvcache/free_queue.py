"""The order in which blocks are taken: a doubly linked list over block ids.

The head is taken next. Any block leaves from the middle in constant time. Links live in two lists indexed by block
id; the null block's slot is the sentinel between tail and head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from core.ids import NULL_BLOCK, BlockId

_OUT = -1


class FreeQueue:
    """Blocks nobody holds, next to be taken first."""

    __slots__ = ("_next", "_num_blocks", "_previous")

    def __init__(self, num_blocks: int) -> None:
        """A queue of blocks 1 .. num_blocks - 1 in ascending order."""
        self._next = [*range(1, num_blocks), 0]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._num_blocks = num_blocks - 1

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, block: BlockId) -> bool:
        return block != NULL_BLOCK and self._next[block] != _OUT

    def __iter__(self) -> Iterator[BlockId]:
        block = self._next[0]
        while block:
            yield BlockId(block)
            block = self._next[block]

    def pop_head(self) -> BlockId:
        """Take the block at the head."""
        assert self._num_blocks, "the free queue is empty"
        head = BlockId(self._next[0])
        self.remove(head)
        return head

    def remove(self, block: BlockId) -> None:
        """Take a block from wherever it stands."""
        before, after = self._previous[block], self._next[block]
        assert block != NULL_BLOCK, "the null block is never in the free queue"
        assert after != _OUT, f"block {block} is not in the free queue"
        self._next[before], self._previous[after] = after, before
        self._next[block] = self._previous[block] = _OUT
        self._num_blocks -= 1

    def append(self, block: BlockId) -> None:
        """Put a block at the tail."""
        self._insert(self._previous[0], block)

    def prepend(self, blocks: Iterable[BlockId]) -> None:
        """Put blocks at the head, keeping their order."""
        before = 0
        for block in blocks:
            self._insert(before, block)
            before = block

    def check_integrity(self) -> None:
        """Assert that the links agree with each other and with the count."""
        seen = [0, *self]
        for before, after in zip(seen, [*seen[1:], 0], strict=True):
            assert self._previous[after] == before, f"links of blocks {before} and {after} differ"
        assert len(seen) - 1 == self._num_blocks, (
            f"{len(seen) - 1} linked, {self._num_blocks} counted"
        )
        assert len(set(seen)) == len(seen), "a block is linked twice"

    def check_block(self, block: BlockId) -> None:
        """Assert that the links of one block agree with those of its neighbours."""
        before, after = self._previous[block], self._next[block]
        if after == _OUT:
            assert before == _OUT, f"block {block} is linked on one side"
            return
        assert self._next[before] == block, f"links of blocks {before} and {block} differ"
        assert self._previous[after] == block, f"links of blocks {block} and {after} differ"

    def _insert(self, before: int, block: BlockId) -> None:
        assert block != NULL_BLOCK, "the null block is never in the free queue"
        assert self._next[block] == _OUT, f"block {block} is in the free queue already"
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self._num_blocks += 1
