"""The life of a block, and the right to write into one.

States and transitions, as used by pools, sessions and tiers:

    FREE      --allocate, generation+1-->          RESERVED
    RESERVED  --first write-->                     FILLING
    FILLING   --full, verified, hashed-->          COMMITTED
    COMMITTED --last reference dropped-->          CACHED
    CACHED    --touched-->                         COMMITTED
    CACHED    --evicted-->                         FREE
    any       --abort, no writer inside-->         FREE
    any       --abort, a writer inside-->          QUARANTINED
    QUARANTINED --last writer left or dead-->      FREE

Only the engine thread changes states. A mover (another thread) may do two things: `enter` a block under a permit,
and `leave` it. The check of the permit and the count of writers inside are one critical section, so an abort sees
every writer that was let in, and a revoked permit lets nobody in. A mover that leaves a quarantined block as the last
writer is told so, and posts that to the engine thread, which calls `settle`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from core.ids import BlockId, Generation, SessionId


class BlockState(IntEnum):
    """Where a block is in its life."""

    FREE = 0
    RESERVED = 1
    FILLING = 2
    COMMITTED = 3
    CACHED = 4
    QUARANTINED = 5


_WRITABLE = (BlockState.RESERVED, BlockState.FILLING)


class Generations(Protocol):
    """A number for each block, which may lie where other processes read it."""

    def __len__(self) -> int: ...

    def __getitem__(self, block: int, /) -> int: ...

    def __setitem__(self, block: int, generation: int, /) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Permit:
    """The right of one attempt of one session to write into its blocks, until revoked.

    session, attempt: whose right it is.
    generations: the generation of each block that may be written, as it was when the permit was granted.
    """

    session: SessionId
    attempt: int
    generations: dict[BlockId, Generation] = field(repr=False)


class BlockLife:
    """State, generation and writer count of every block of one pool.

    Methods named for a transition are the engine thread's and assert that the transition exists; `enter`, `leave`
    may be called from any thread.
    """

    def __init__(self, num_blocks: int, generations: Generations | None = None) -> None:
        """generations: where each block's generation is kept, all 0; other processes may read it there."""
        assert generations is None or len(generations) == num_blocks, "one generation a block"
        self._state = [BlockState.FREE] * num_blocks
        self._generation: Generations = [0] * num_blocks if generations is None else generations
        self._writers = [0] * num_blocks
        self._live_permits: set[Permit] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._state)

    def state(self, block: BlockId) -> BlockState:
        """The block's state; exact on the engine thread, a snapshot elsewhere."""
        return self._state[block]

    def generation(self, block: BlockId) -> Generation:
        """How often the block has been allocated."""
        return Generation(self._generation[block])

    def num_writers(self, block: BlockId) -> int:
        """Movers inside the block now."""
        return self._writers[block]

    @property
    def num_live_permits(self) -> int:
        """Permits granted and not yet revoked."""
        return len(self._live_permits)

    def is_live(self, permit: Permit) -> bool:
        """Whether a permit has been granted here and not yet revoked."""
        return permit in self._live_permits

    def is_written_lawfully(self, block: BlockId) -> bool:
        """Whether each writer inside a block is there under a live permit, or the block is set aside for it."""
        with self._lock:
            if not self._writers[block] or self._state[block] is BlockState.QUARANTINED:
                return True
            generation = self._generation[block]
            return any(p.generations.get(block) == generation for p in self._live_permits)

    # ---- transitions, engine thread only

    def allocate(self, block: BlockId) -> Generation:
        """FREE -> RESERVED under a new generation, which is returned."""
        with self._lock:
            self._move(block, BlockState.RESERVED, BlockState.FREE)
            self._generation[block] += 1
            return Generation(self._generation[block])

    def begin_fill(self, block: BlockId) -> None:
        """RESERVED -> FILLING; a block that is FILLING already stays so."""
        with self._lock:
            self._move(block, BlockState.FILLING, *_WRITABLE)

    def commit(self, block: BlockId) -> None:
        """FILLING -> COMMITTED: every slot is written and verified, and the block has a hash."""
        with self._lock:
            assert self._writers[block] == 0, f"block {block} committed with a writer inside"
            self._move(block, BlockState.COMMITTED, BlockState.FILLING)

    def rest(self, block: BlockId) -> None:
        """COMMITTED -> CACHED: the last reference is gone, the content stays findable."""
        with self._lock:
            self._move(block, BlockState.CACHED, BlockState.COMMITTED)

    def touch(self, block: BlockId) -> None:
        """CACHED -> COMMITTED: the content is in use again."""
        with self._lock:
            self._move(block, BlockState.COMMITTED, BlockState.CACHED)

    def evict(self, block: BlockId) -> None:
        """CACHED -> FREE: the content is given up."""
        with self._lock:
            self._move(block, BlockState.FREE, BlockState.CACHED)

    def abort(self, block: BlockId) -> BlockState:
        """Give a block up in any state but FREE: FREE at once, or QUARANTINED while a writer is inside."""
        with self._lock:
            assert self._state[block] is not BlockState.FREE, f"block {block} is free already"
            inside = self._writers[block] > 0
            state = BlockState.QUARANTINED if inside else BlockState.FREE
            self._state[block] = state
            return state

    def settle(self, block: BlockId) -> bool:
        """QUARANTINED -> FREE when no writer is inside any more; whether that happened."""
        with self._lock:
            if self._state[block] is not BlockState.QUARANTINED or self._writers[block]:
                return False
            self._state[block] = BlockState.FREE
            return True

    def expel(self, block: BlockId) -> None:
        """Forget the writers of a block: their process is known to be dead."""
        with self._lock:
            self._writers[block] = 0

    # ---- permits: granted and revoked by the engine thread, used by movers

    def grant(self, session: SessionId, attempt: int, blocks: Iterable[BlockId]) -> Permit:
        """Let one attempt of a session write into blocks that are RESERVED or FILLING now."""
        with self._lock:
            generations: dict[BlockId, Generation] = {}
            for block in blocks:
                state = self._state[block]
                assert state in _WRITABLE, f"permit for block {block}, which is {state.name}"
                generations[block] = Generation(self._generation[block])
            permit = Permit(session, attempt, generations)
            self._live_permits.add(permit)
            return permit

    def revoke(self, permit: Permit) -> None:
        """End a permit; from the return of this call on, nobody enters under it. Idempotent."""
        with self._lock:
            self._live_permits.discard(permit)

    def enter(self, permit: Permit, block: BlockId) -> bool:
        """Go into a block to write; False when the permit is revoked or is for another life of the block."""
        with self._lock:
            allowed = (
                permit in self._live_permits
                and permit.generations.get(block) == self._generation[block]
                and self._state[block] in _WRITABLE
            )
            if allowed:
                self._writers[block] += 1
            return allowed

    def enter_all(self, permit: Permit, blocks: Sequence[BlockId]) -> list[bool]:
        """`enter` each of several blocks, in one critical section."""
        with self._lock:
            if permit not in self._live_permits:
                return [False] * len(blocks)
            meant, now = permit.generations.get, self._generation
            state, writers = self._state, self._writers
            entered = [meant(block) == now[block] and state[block] in _WRITABLE for block in blocks]
            for block, is_inside in zip(blocks, entered, strict=True):
                writers[block] += is_inside
            return entered

    def leave_all(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """`leave` each of several blocks, in one critical section; those that are quarantined and empty now."""
        writers, state, aside, empty = self._writers, self._state, BlockState.QUARANTINED, []
        with self._lock:
            for block in blocks:
                left = writers[block] = writers[block] - 1
                assert left >= 0, f"leave without enter, block {block}"
                if not left and state[block] is aside:
                    empty.append(block)
        return empty

    def leave(self, block: BlockId) -> bool:
        """Come out of a block that `enter` let this caller into; whether it was the last out of a quarantined one."""
        with self._lock:
            assert self._writers[block] > 0, f"leave without enter, block {block}"
            self._writers[block] -= 1
            return self._writers[block] == 0 and self._state[block] is BlockState.QUARANTINED

    def _move(self, block: BlockId, to: BlockState, *allowed: BlockState) -> None:
        state = self._state[block]
        assert state in allowed, f"block {block}: {state.name} -> {to.name} is no transition"
        self._state[block] = to
