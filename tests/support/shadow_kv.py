"""A runner that computes nothing but remembers everything: which history each slot of the pool holds.

The KV of a position is a function of all tokens up to it, so a slot holds a digest of those. Each step checks that
every position a sequence attends to holds that sequence's own history in every KV group, and that whatever is written
is FILLING and held by its writer alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from core.blocks import BlockState
from core.ids import BlockId
from engine.kvcache.block_pool import BlockPool
from engine.sampler.rows import SampledToken
from engine.scheduler.output import ScheduledItem, SchedulerOutput
from engine.sequence import Sequence as EngineSequence

VOCAB_SIZE = 60


def digest_chain(token_ids: Sequence[int]) -> list[int]:
    """The content of each position's slot."""
    digests, running = [], 0
    for token_id in token_ids:
        running = zlib.crc32(token_id.to_bytes(4, "little"), running)
        digests.append(running)
    return digests


def token_after(digest: int, choice: int) -> int:
    """What the model says after a history; choices differ as random numbers would make them."""
    return zlib.crc32(choice.to_bytes(4, "little"), digest) % VOCAB_SIZE


class ShadowKV:
    """Slots of every block of one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._slots: dict[tuple[int, int], int] = {}

    def run(self, output: SchedulerOutput) -> list[SampledToken]:
        """Copy, write, check, sample: what a real step does."""
        for source, destination in output.copies:
            for slot in range(self.block_size):
                self._slots[destination, slot] = self._slots.get((source, slot), -1)
        for item in output.items:
            self._write(item)
        sampled = []
        for item in output.items:
            last = self._check(item)
            choices = range(item.sequence.choice, item.sequence.choice + item.num_samples)
            sampled += [SampledToken(token_after(last, choice)) for choice in choices]
        return sampled

    def receive(self, sequence: EngineSequence, positions: Sequence[int]) -> None:
        """A mover writes whole blocks of an arriving sequence's prompt."""
        digests = digest_chain(sequence.token_ids[: sequence.num_arriving_tokens])
        for position in positions:
            first = position * self.block_size
            for ids in sequence.block_table.groups:
                for slot, digest in enumerate(digests[first : first + self.block_size]):
                    self._slots[ids[position], slot] = digest

    def _write(self, item: ScheduledItem) -> None:
        digests = digest_chain(item.sequence.token_ids)
        for position in range(item.start, item.start + item.num_tokens):
            for block, slot in self._places(item.sequence, position):
                assert self.pool.life.state(block) is BlockState.FILLING, "a write outside FILLING"
                assert self.pool.references(block) == 1, "a write into a shared block"
                self._slots[block, slot] = digests[position]

    def _check(self, item: ScheduledItem) -> int:
        end = item.start + item.num_tokens
        expected = digest_chain(item.sequence.token_ids[:end])
        for position, digest in enumerate(expected):
            held = [self._slots.get(place) for place in self._places(item.sequence, position)]
            assert set(held) == {digest}, "a slot holds another history"
        return expected[-1]

    def _places(self, sequence: EngineSequence, position: int) -> list[tuple[BlockId, int]]:
        """The slot of a position in each group."""
        index, slot = divmod(position, self.block_size)
        return [(ids[index], slot) for ids in sequence.block_table.groups]
