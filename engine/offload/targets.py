"""Blocks of the pool as the target of a load: written under a permit, like those that other workers send."""

from __future__ import annotations

from collections.abc import Sequence

from core.blocks import BlockLife, Permit
from core.ids import BlockId
from engine.kvcache.storage import Storage
from kvtransfer.events import PostEvent, WriterLeft


class PermittedBlocks:
    """The blocks of one job; a LoadTargets. `enter` and `leave`: the mover's thread."""

    def __init__(
        self,
        life: BlockLife,
        permit: Permit,
        blocks: Sequence[BlockId],
        storage: Storage,
        post: PostEvent,
    ) -> None:
        self._life = life
        self._permit = permit
        self._blocks = blocks
        self._block_bytes = storage.layout.block_bytes
        self._buffer = storage.buffer
        self._post = post
        self.num_done = 0

    def enter(self, index: int) -> memoryview | None:
        """See LoadTargets.enter: None once the permit is revoked."""
        block = self._blocks[index]
        if not self._life.enter(self._permit, block):
            return None
        return self._buffer[block * self._block_bytes : (block + 1) * self._block_bytes]

    def leave(self, index: int) -> None:
        """See LoadTargets.leave."""
        self.num_done += 1
        block = self._blocks[index]
        if self._life.leave(block):
            self._post(WriterLeft(block))
