"""A KV pool in a card's memory, with a mirror of it on the host for those who move blocks.

Kernels see the card's memory. Movers keep to the host: block b of the pool is block b of the mirror, at the same
offset, so receiver, sender and permits are what they are on the host. Two copies join the two:

    bring_in   mirror -> card   a run has arrived and is verified; queued, in front of every step that may read it
    bring_out  card -> mirror   a range of layers is computed; waited for, since the sender reads when this returns

Who may use which bytes when follows from the life of a block (`core.blocks`); the mirror adds no state of its own:
- A receiver writes the mirror of a block under a permit, while the block is RESERVED or FILLING for an arriving
  sequence. No step uses the block then. Should a block be given up and reserved anew while a copy in is queued, that
  copy may carry anything: whatever is read of the new life is written behind it in the queue.
- A sender reads the mirror of a block that its session holds, between `bring_out` and the end of the session. Other
  sessions that hold the block bring out the same bytes again, since computed layers do not change.
- All copies and steps are queued by the engine thread on one stream, so they run in the order in which the scheduler
  gave blocks away.

What it costs: as much page-locked memory on the host as the pool has on the card, taken at the start whether or not
blocks ever move; a queued copy for each run that arrives; and at each mark of a step with a session that has blocks
to send, a copy a block, and the engine thread waiting until the card has done all it was given, so that the card
idles while the next layers are queued.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.errors import ConfigError
from core.ids import BlockId
from core.kv_layout import KVLayout
from engine.devices import lock_pages, unlock_pages, wait_for
from engine.kvcache.storage import PoolStorage, allocate_pool, views_of_layers
from kernels.kv_view import KVView
from kvtransfer.pool_memory import PoolMemory


class DeviceStorage:
    """One pool's memory on a device, and its mirror. Engine thread only, but for `buffer`.

    mirror: host memory of the same layout and size; owned here from now on.
    device: where the pool itself is; the host will do, as a second memory.
    """

    def __init__(self, mirror: PoolStorage, device: torch.device) -> None:
        self.layout = mirror.layout
        self._device = device
        self._mirror: PoolStorage | None = mirror
        shape = (mirror.num_blocks, mirror.block_bytes)
        self._tensor: Tensor | None = torch.zeros(shape, dtype=torch.uint8, device=device)
        lock_pages(mirror.tensor, device)

    @property
    def tensor(self) -> Tensor:
        """See Storage.tensor."""
        assert self._tensor is not None, "the pool is closed"
        return self._tensor

    @property
    def mirror(self) -> PoolStorage:
        """The host's side."""
        assert self._mirror is not None, "the pool is closed"
        return self._mirror

    @property
    def buffer(self) -> memoryview:
        """See Storage.buffer: the mirror's."""
        return self.mirror.buffer

    @property
    def memory(self) -> PoolMemory:
        """See Storage.memory: the mirror's."""
        return self.mirror.memory

    def layer_views(self, group: int = 0) -> list[KVView]:
        """See Storage.layer_views."""
        return views_of_layers(self.layout, self.tensor, group)

    def bring_in(self, group: int, block: BlockId, first_layer: int, num_layers: int) -> None:
        """See Staging.bring_in."""
        place = self._place(group, first_layer, num_layers)
        self.tensor[block, place].copy_(self.mirror.tensor[block, place], non_blocking=True)

    def bring_out(
        self, group: int, blocks: Sequence[BlockId], first_layer: int, num_layers: int
    ) -> None:
        """See Staging.bring_out."""
        place = self._place(group, first_layer, num_layers)
        for block in blocks:
            self.mirror.tensor[block, place].copy_(self.tensor[block, place], non_blocking=True)
        wait_for(self._device)

    def note_used(self, num_blocks: int, *, is_idle: bool) -> None:
        """See Storage.note_used: all of both memories is there from the start."""

    def close(self) -> None:
        """See Storage.close. Movers have stopped."""
        if self._mirror is not None:
            try:
                unlock_pages(self._mirror.tensor, self._device)
            finally:  # a card that is broken keeps no host memory
                self._mirror.close()
        self._mirror = self._tensor = None

    def _place(self, group: int, first_layer: int, num_layers: int) -> slice:
        """Where a range of layers lies inside a block."""
        run = self.layout.layer_run(group, first_layer, num_layers)
        return slice(run.offset_bytes, run.offset_bytes + run.num_bytes)


def allocate_device_pool(layout: KVLayout, num_blocks: int, device: torch.device) -> DeviceStorage:
    """Memory on `device` for `num_blocks` blocks of `layout`, all zero, and as much on the host."""
    mirror = allocate_pool(layout, num_blocks)
    try:
        return DeviceStorage(mirror, device)
    except RuntimeError as error:  # torch's own, for memory on either side
        mirror.close()
        raise ConfigError(
            f"KV pool: {num_blocks * layout.block_bytes} bytes on {device} and as many page-locked on the host "
            f"cannot be had; lower --kv-cache-memory-bytes ({str(error).splitlines()[0]})"
        ) from error
