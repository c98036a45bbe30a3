"""Looks at an idle engine's books: whatever is held while nothing runs is held by mistake.

Promises: bounded work a look, so that a request that comes meanwhile waits for some hundred blocks at most; a
violation is logged as an error and counted, and the engine goes on. An engine that has become idle is looked at once,
the whole pool in turns; then not again before it has worked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from core.blocks import BlockLife
from core.ids import BlockId
from engine.kvcache.block_pool import BlockPool
from engine.scheduler.scheduler import Scheduler

BLOCKS_A_LOOK = 256
"""Blocks that one look goes through: well under a millisecond."""

_log = logging.getLogger(__name__)


def check_writers(life: BlockLife, blocks: Iterable[BlockId]) -> None:
    """Raise AssertionError for a writer inside a block that is neither under a live permit nor quarantined.

    Holds between two acts of the engine: within one, a permit is revoked before its blocks are given up.
    """
    for block in blocks:
        assert life.is_written_lawfully(block), (
            f"block {block} has a writer inside without a permit"
        )


class IdleCheck:
    """The check of one engine; engine thread only."""

    def __init__(self, scheduler: Scheduler, pool: BlockPool) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._next_block = 1
        self._num_unseen = 0
        self.num_violations = 0

    def note_work(self) -> None:
        """The engine has something to do: when it is idle again, everything is looked at anew."""
        self._num_unseen = self._pool.num_usable

    def look(self) -> None:
        """Look at a part of what an idle engine has not been seen to be in order with since it last worked."""
        if not self._num_unseen:
            return
        try:
            self._check_gauges()
            self._check_blocks()
        except AssertionError as violation:
            self.num_violations += 1
            self._num_unseen = 0  # one word for one fault: what follows from it is not news
            _log.error("integrity: an idle engine is not at rest: %s", violation)

    def _check_gauges(self) -> None:
        scheduler, pool = self._scheduler, self._pool
        gauges = {
            "running sequences": scheduler.num_running,
            "waiting sequences": scheduler.num_waiting,
            "arriving sequences": scheduler.num_arriving,
            "loading sequences": scheduler.num_loading,
            "sessions": scheduler.num_sessions,
            "held blocks": pool.num_held,
            "live permits": pool.life.num_live_permits,
        }
        busy = [f"{count} {name}" for name, count in gauges.items() if count]
        assert not busy, ", ".join(busy)

    def _check_blocks(self) -> None:
        for _ in range(min(BLOCKS_A_LOOK, self._num_unseen)):
            block = BlockId(self._next_block)
            references = self._pool.references(block)
            assert not references, f"block {block} has {references} references"
            self._pool.check_block(block)
            check_writers(self._pool.life, [block])
            self._next_block = self._next_block % self._pool.num_usable + 1
            self._num_unseen -= 1
