"""Gives sequences their blocks: everything that changes a block table goes through here.

One place for the rules on which tables, pool and chains must agree:
- a table's positions [0, num_computed // block_size) are full; only the block at position num_computed // block_size
  and later ones are written, and only while this sequence is their one holder and they have no hash: a tail that is
  shared, or of whose content only the beginning is wanted, is copied first;
- blocks are released tail first, spares before them;
- a full, computed block is committed when prefix caching is on, else it stays FILLING until it is released.

Decides nothing: whether a sequence should have blocks is the scheduler's business.
"""

from __future__ import annotations

from core.block_hash import HashRoot
from core.blocks import BlockState
from core.ids import BlockId
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.block_table import BlockTable
from engine.kvcache.chain import BlockContent, HashChain
from engine.sequence import Sequence


class KVManager:
    """Block tables of one engine's sequences over one pool.

    pool: the blocks.
    block_size: tokens in a block.
    num_groups: KV groups; every table has that many rows.
    hash_root: where chains begin; None turns prefix caching off.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, num_groups: int, hash_root: HashRoot | None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_groups = num_groups
        self._hash_root = hash_root

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence can hold when it has the pool to itself."""
        return self.pool.num_usable // self.num_groups * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all groups, that hold `num_tokens` tokens."""
        return self._positions(num_tokens) * self.num_groups

    def attach(self, sequence: Sequence) -> None:
        """Give a new sequence its hash chain."""
        if self._hash_root is not None and sequence.chain is None:
            salt = sequence.request.cache_salt
            sequence.chain = HashChain(self._hash_root, self.block_size, salt)

    def count_cached_tokens(self, sequence: Sequence) -> int:
        """Leading tokens whose KV is in the pool now; takes nothing, so it is a hint."""
        return len(self._match(sequence, sequence.num_tokens)[0]) * self.block_size

    def contents(self, sequence: Sequence) -> list[BlockContent]:
        """What the full blocks of a sequence hold, or will hold, in front of its last token; [] without caching."""
        if sequence.chain is None:
            return []
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        return sequence.chain.contents(sequence.token_ids, num_blocks)

    def matched(self, sequence: Sequence) -> list[list[BlockId]]:
        """For each group the blocks that `contents` finds in the pool, as many in each; takes no reference."""
        return self._match(sequence, sequence.num_tokens - 1)

    # ---- taking blocks

    def fits(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether blocks for `num_tokens` tokens are free now, counting what is cached of the sequence."""
        if self.num_blocks_for(num_tokens) <= self.pool.num_free:
            return True  # whatever is cached could only make it fewer
        matched = self._match(sequence, sequence.num_tokens - 1)
        return self._shortage(sequence, matched, num_tokens) <= 0

    def take_all(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for all of a sequence's tokens, cached ones first, if `num_tokens` would fit; all or none.

        Sets num_computed_tokens to what the cached blocks cover: at most all tokens but the last. The last one of them
        may be one of which only the beginning is wanted; a spare is held for the copy that `prepare_write` makes.
        """
        assert not len(sequence.block_table), "the sequence holds blocks already"
        matched = self._match(sequence, sequence.num_tokens - 1)
        if self._shortage(sequence, matched, num_tokens) > 0:
            return False
        self._acquire(sequence, matched)
        num_copies = self._acquire_beginning(sequence, num_tokens)
        taken = self.extend(sequence, sequence.num_tokens)
        taken = taken and self.add_spares(sequence, num_copies)
        assert taken, "blocks that were counted as free are not"
        return True

    def pin_prefix(self, sequence: Sequence, max_tokens: int) -> int:
        """Acquire what is cached beyond the table's end, within `max_tokens`; how many tokens the table covers then.

        Call only while every block in the table is whole and verified.
        """
        held = len(sequence.block_table)
        matched = self._match(sequence, min(max_tokens, sequence.num_tokens))
        self._acquire(sequence, [ids[held:] for ids in matched])
        return sequence.num_computed_tokens

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """RESERVED blocks at the table's end until it covers `num_tokens` tokens; all or none."""
        table = sequence.block_table
        missing = self._positions(num_tokens) - len(table)
        if missing <= 0:
            return True
        blocks = self._allocate(table, missing * self.num_groups)
        if blocks is None:
            return False
        for start in range(0, len(blocks), self.num_groups):
            table.append(blocks[start : start + self.num_groups])
        return True

    def add_spares(self, sequence: Sequence, num_blocks: int) -> bool:
        """RESERVED blocks that stand at no position yet; all or none."""
        blocks = self.pool.allocate(num_blocks)
        if blocks is None:
            return False
        sequence.block_table.spares += blocks
        return True

    def prepare_write(
        self, sequence: Sequence, num_tokens: int, copies: list[tuple[BlockId, BlockId]]
    ) -> bool:
        """Make the next `num_tokens` tokens writable; False, with nothing changed, when blocks are lacking.

        A partly filled block that others hold too, and one of which only the beginning is this sequence's, is replaced
        by a copy, to be made before the step writes.
        """
        size, table = self.block_size, sequence.block_table
        start = sequence.num_computed_tokens
        first, end = start // size, self._positions(start + num_tokens)
        shares_tail = start % size != 0 and not self._is_own(table.groups[0][first])
        if not shares_tail and end <= len(table) and start % size and end == first + 1:
            return True  # one more token in a block that is FILLING and its own: nearly every decode step
        lacking = (max(0, end - len(table)) + shares_tail) * self.num_groups
        if lacking - len(table.spares) > self.pool.num_free:
            return False
        if shares_tail:
            self._copy_tail(table, first, copies)
        self.extend(sequence, start + num_tokens)
        for ids in table.groups:
            for block in ids[-(-start // size) : end]:
                self.pool.begin_fill(block)
        return True

    def share(self, source: Sequence, fork: Sequence) -> None:
        """Let a fork hold all blocks of its source, the partly filled tail included."""
        for ids, source_ids in zip(fork.block_table.groups, source.block_table.groups, strict=True):
            assert not ids, "the fork holds blocks already"
            for block in source_ids:
                self.pool.acquire(block)
            ids += source_ids
        fork.num_computed_tokens = source.num_computed_tokens

    # ---- content

    def commit_full(self, sequence: Sequence, start: int, end: int) -> None:
        """Commit the blocks that tokens [start, end) made full. With prefix caching off they stay FILLING."""
        if sequence.chain is None:
            return
        for position in range(start // self.block_size, end // self.block_size):
            content = sequence.chain.content(sequence.token_ids, position)
            for group, ids in enumerate(sequence.block_table.groups):
                if self.pool.life.state(ids[position]) is BlockState.FILLING:
                    self.pool.commit(ids[position], content, group)

    def accept_received(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens [0, num_tokens) were received whole and verified: FILLING, the full ones committed."""
        for ids in sequence.block_table.groups:
            for block in ids[: self._positions(num_tokens)]:
                if self.pool.life.state(block) is BlockState.RESERVED:
                    self.pool.begin_fill(block)
        self.commit_full(sequence, 0, num_tokens)
        sequence.num_computed_tokens = num_tokens

    # ---- giving blocks back

    def release(self, sequence: Sequence, keep_first: int = 0) -> None:
        """Give back the spares and every position from `keep_first` on, tail first."""
        table = sequence.block_table
        self.pool.release(table.take_spares())
        self.pool.release(table.cut(keep_first))
        kept_tokens = len(table) * self.block_size
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, kept_tokens)

    # ---- inside

    def _positions(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _match(self, sequence: Sequence, max_tokens: int) -> list[list[BlockId]]:
        """For each group the cached blocks of the longest head that all groups have."""
        if sequence.chain is None:
            return [[] for _ in range(self.num_groups)]
        contents = sequence.chain.contents(sequence.token_ids, max_tokens // self.block_size)
        matched = [self.pool.match(contents, group) for group in range(self.num_groups)]
        common = min(map(len, matched))
        return [ids[:common] for ids in matched]

    def _shortage(self, sequence: Sequence, matched: list[list[BlockId]], num_tokens: int) -> int:
        """Blocks lacking, at zero or below none, to hold `num_tokens` tokens with these matched ones in front."""
        from_queue = sum(self.pool.num_cached_among(ids) for ids in matched)
        fresh = self.num_blocks_for(num_tokens) - sum(map(len, matched))
        return from_queue + fresh - len(sequence.block_table.spares) - self.pool.num_free

    def _acquire(self, sequence: Sequence, matched: list[list[BlockId]]) -> None:
        for ids, found in zip(sequence.block_table.groups, matched, strict=True):
            for block in found:
                self.pool.acquire(block)
            ids += found
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size

    def _acquire_beginning(self, sequence: Sequence, num_tokens: int) -> int:
        """Hold at the table's end a block that begins as the next one would, if there is one, and room for its copy.

        num_tokens: what has to fit beside it. Returns how many blocks the copy takes.
        """
        start = sequence.num_computed_tokens
        wanted = sequence.token_ids[start : min(start + self.block_size, sequence.num_tokens - 1)]
        if sequence.chain is None or not wanted:
            return 0
        table = sequence.block_table
        parent = sequence.chain.parent(sequence.token_ids, len(table))
        groups = range(self.num_groups)
        found = [self.pool.match_beginning(parent, wanted, group) for group in groups]
        count = min(count for _, count in found)
        blocks = [block for block, _ in found]
        num_held = len(table) * self.num_groups
        needed = self.pool.num_cached_among(blocks) + self.num_blocks_for(num_tokens) - num_held
        if not count or needed > self.pool.num_free + len(table.spares):
            return 0
        for block in blocks:
            self.pool.acquire(block)
        table.append(blocks)
        sequence.num_computed_tokens = start + count
        return self.num_groups

    def _is_own(self, block: BlockId) -> bool:
        """Whether a partly filled block of a sequence is held, and meant to be filled, by that sequence alone."""
        pool = self.pool
        return pool.references(block) == 1 and pool.life.state(block) is BlockState.FILLING

    def _allocate(self, table: BlockTable, num_blocks: int) -> list[BlockId] | None:
        """Spares first, then the pool; all or none."""
        num_spares = min(num_blocks, len(table.spares))
        fresh = self.pool.allocate(num_blocks - num_spares)
        if fresh is None:
            return None
        spares = table.spares[:num_spares]
        del table.spares[:num_spares]
        return spares + fresh

    def _copy_tail(
        self, table: BlockTable, position: int, copies: list[tuple[BlockId, BlockId]]
    ) -> None:
        own = self._allocate(table, self.num_groups)
        assert own is not None, "blocks that were counted as free are not"
        for ids, block in zip(table.groups, own, strict=True):
            self.pool.begin_fill(block)
            copies.append((ids[position], block))
            self.pool.release([ids[position]])
            ids[position] = block
