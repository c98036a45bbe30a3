"""What full blocks hold, and the hash chain that names it.

A HashChain belongs to one sequence and grows as its blocks fill. It is a function of token ids alone, so it may name
blocks that are not computed yet: that is how a prompt is looked up before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from core.block_hash import BlockHash, HashRoot, hash_block
from core.errors import ConfigError


class BlockContent(NamedTuple):
    """What one full block holds.

    hashes: the chain's hashes inside the block, one each hash block size; the last one names the block.
    parent: the hash before the block.
    token_ids: the block's tokens.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash
    token_ids: tuple[int, ...]

    @property
    def key(self) -> BlockHash:
        """The hash that names the block and all before it."""
        return self.hashes[-1]


class HashChain:
    """Contents of the full blocks of one sequence, head first."""

    __slots__ = ("_block_size", "_contents", "_last", "_root")

    def __init__(self, root: HashRoot, block_size: int, salt: str = "") -> None:
        if block_size % root.block_size:
            raise ConfigError(
                f"block_size: {block_size} must be a multiple of the hash block size {root.block_size}"
            )
        self._root = root
        self._block_size = block_size
        self._contents: list[BlockContent] = []
        self._last = root.salted(salt)

    def contents(self, token_ids: Sequence[int], num_blocks: int) -> list[BlockContent]:
        """Contents of the first `num_blocks` full blocks of a sequence whose tokens begin with those seen before."""
        size = self._block_size
        for start in range(len(self._contents) * size, num_blocks * size, size):
            tokens = tuple(token_ids[start : start + size])
            assert len(tokens) == size, f"block at token {start} is not full"
            self._append(tokens)
        return self._contents[:num_blocks]

    def content(self, token_ids: Sequence[int], position: int) -> BlockContent:
        """Content of the full block at `position`."""
        if position >= len(self._contents):
            self.contents(token_ids, position + 1)
        return self._contents[position]

    def parent(self, token_ids: Sequence[int], position: int) -> BlockHash:
        """The hash in front of `position`, all blocks before which are full."""
        if position == len(self._contents):
            return self._last
        if position < len(self._contents):
            return self._contents[position].parent
        return self.content(token_ids, position - 1).key

    def copy(self) -> HashChain:
        """The same chain so far, to grow on its own (a fork)."""
        twin = HashChain.__new__(HashChain)
        twin._root, twin._block_size = self._root, self._block_size
        twin._contents, twin._last = list(self._contents), self._last
        return twin

    def _append(self, tokens: tuple[int, ...]) -> None:
        parent, size = self._last, self._root.block_size
        hashes = []
        for start in range(0, len(tokens), size):
            self._last = hash_block(self._root.algorithm, self._last, tokens[start : start + size])
            hashes.append(self._last)
        self._contents.append(BlockContent(tuple(hashes), parent, tokens))
