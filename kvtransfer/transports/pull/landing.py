"""Memory of one connection beside the pool: what has to be looked at before it counts, or may not go to its place.

    | the pool's epoch as it is now, EPOCH_BYTES | generations of some blocks as they are now | one run |

Half-open spans of blocks are read, so that neighbours cost one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvtransfer.pool_memory import EPOCH_AT, EPOCH_BYTES, GENERATION_BYTES, GENERATIONS_AT
from kvtransfer.transports.links.wire import MAX_ENTRIES, RemotePool
from kvtransfer.transports.pull.engine import Engine, Peer, Read

_MAX_GAP_BLOCKS = 8
"""Blocks whose generations are read in vain rather than in a piece more."""

_NUM_GENERATIONS = MAX_ENTRIES * _MAX_GAP_BLOCKS
_RUN_AT = EPOCH_BYTES + _NUM_GENERATIONS * GENERATION_BYTES


class Landing:
    """See the module. Belongs to the receiver's mover thread."""

    def __init__(self, engine: Engine, run_bytes: int) -> None:
        """run_bytes: the longest run."""
        self._memory = bytearray(_RUN_AT + run_bytes)
        self._engine = engine
        self._address = engine.register(memoryview(self._memory))

    def close(self) -> None:
        """Give the memory back. Nothing is read into it any more."""
        self._engine.unregister(self._address)

    @property
    def run_address(self) -> int:
        """Where a run may be read to."""
        return self._address + _RUN_AT

    def run(self, start: int, num_bytes: int) -> memoryview:
        """A part of the run that was read."""
        return memoryview(self._memory)[_RUN_AT + start : _RUN_AT + start + num_bytes]

    def begin_lives(self, peer: Peer, pool: RemotePool, blocks: Sequence[int]) -> Read:
        """Begin to read the epoch of a peer's pool and the generations of some blocks."""
        self._memory[:EPOCH_BYTES] = bytes(EPOCH_BYTES)
        spans = spans_of(blocks)
        sizes = [EPOCH_BYTES, *((end - first) * GENERATION_BYTES for first, end in spans)]
        theirs = [EPOCH_AT, *(GENERATIONS_AT + first * GENERATION_BYTES for first, _ in spans)]
        own = accumulate(sizes[:-1], initial=self._address)
        return peer.read(list(own), [pool.address + place for place in theirs], sizes)

    def intact(
        self, pool: RemotePool, blocks: Sequence[int], generations: Sequence[int]
    ) -> list[bool]:
        """Which blocks were, when `begin_lives` was over, in the life that is meant. blocks: the same ones."""
        if self._memory[:EPOCH_BYTES] != pool.epoch:
            return [False] * len(blocks)
        now: dict[int, int] = {}
        with memoryview(self._memory) as whole, whole[EPOCH_BYTES:_RUN_AT].cast("Q") as read:
            place = 0
            for first, end in spans_of(blocks):
                now.update(zip(range(first, end), read[place : place + end - first], strict=True))
                place += end - first
        return [now[b] == generation for b, generation in zip(blocks, generations, strict=True)]


def spans_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open spans that hold all of some blocks, and few others."""
    spans: list[tuple[int, int]] = []
    for block in sorted(set(blocks)):
        if spans and block - spans[-1][1] < _MAX_GAP_BLOCKS:
            spans[-1] = (spans[-1][0], block + 1)
        else:
            spans.append((block, block + 1))
    return spans
