"""Pools, contents and hash roots for tests of block bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence

from core.block_hash import BlockHash, HashAlgorithm, HashRoot
from core.blocks import BlockLife
from core.ids import BlockId
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.chain import BlockContent, HashChain

BLOCK_SIZE = 16
ROOT = HashRoot(HashAlgorithm.SHA256, 16, b"root of tests...")


def make_pool(num_usable: int = 10, **options: object) -> BlockPool:
    """A pool of blocks 1 .. num_usable."""
    return BlockPool(BlockLife(num_usable + 1), **options)  # type: ignore[arg-type]


def chain_of(*letters: int, block_size: int = BLOCK_SIZE) -> list[BlockContent]:
    """Contents of a chain whose i-th block repeats the token letters[i]."""
    tokens = [letter for letter in letters for _ in range(block_size)]
    return HashChain(ROOT, block_size).contents(tokens, len(letters))


def keys_of(contents: Sequence[BlockContent]) -> list[BlockHash]:
    """All hashes of contents, in chain order."""
    return [name for content in contents for name in content.hashes]


def commit_chain(
    pool: BlockPool, blocks: Sequence[BlockId], contents: Sequence[BlockContent]
) -> None:
    """Fill and commit blocks with contents."""
    for block, content in zip(blocks, contents, strict=True):
        pool.begin_fill(block)
        pool.commit(block, content)


def store_chain(pool: BlockPool, *letters: int) -> list[BlockId]:
    """Allocate and commit a chain; the blocks are held by the caller, head first."""
    blocks = pool.allocate(len(letters))
    assert blocks is not None
    commit_chain(pool, blocks, chain_of(*letters))
    return blocks
