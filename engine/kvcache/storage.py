"""The bytes of a KV pool: `[num_blocks, block_bytes]`, on the host in one shared mapping.

Owns the memory. Kernels see it as one strided view a layer, movers as one flat memoryview; both are views, nothing
is ever copied here. The memory is a memfd, zero at birth and populated as it is used, so that a pool larger than
what is used costs little, and so that another process of this host can be shown it. Knows nothing of what
a block holds or who may write it: that is `core.blocks` and `BlockPool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from core.errors import ConfigError
from core.ids import BlockId
from core.kv_layout import SCALE_BYTES, KVGroup, KVLayout
from engine.kvcache.pages_ahead import PagesAhead
from kernels.kv_view import ELEMENT_TYPES, KVView
from kvtransfer.pool_memory import PoolMemory


class Staging(Protocol):
    """The way of a block's bytes between where kernels use them and where movers do. Engine thread, or inside a step.

    Layers are places inside the group. Where both use one memory there is nothing to do.
    """

    def bring_in(self, group: int, block: BlockId, first_layer: int, num_layers: int) -> None:
        """Layers that a mover has put into `buffer`, verified, are what kernels read from now on."""
        ...

    def bring_out(
        self, group: int, blocks: Sequence[BlockId], first_layer: int, num_layers: int
    ) -> None:
        """Layers that kernels have written, or are queued to write, are in `buffer` when this returns."""
        ...


class Storage(Staging, Protocol):
    """What an engine needs of a pool's memory.

    Kernels use `tensor` and the views of it, movers use `buffer`. layout: how a block is laid out.
    """

    layout: KVLayout

    @property
    def tensor(self) -> Tensor:
        """All bytes as uint8 `[num_blocks, block_bytes]`, where kernels run."""
        ...

    @property
    def buffer(self) -> memoryview:
        """All bytes, flat and writable, on the host; block b is `[b * block_bytes, (b + 1) * block_bytes)`."""
        ...

    @property
    def memory(self) -> PoolMemory:
        """What `buffer` is a part of, as other processes of this host may be shown it."""
        ...

    def layer_views(self, group: int = 0) -> list[KVView]:
        """One strided view of `tensor` for each layer of a group, in the group's order."""
        ...

    def note_used(self, num_blocks: int, *, is_idle: bool) -> None:
        """So many blocks, from the first on, are in use or have been: memory of some more may be made ready.

        is_idle: whether nobody waits for the cores that this takes.
        """
        ...

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        ...


class PoolStorage:
    """One pool's memory and the views of it.

    layout: how a block is laid out.
    num_blocks: blocks, the null block included.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, memory: PoolMemory) -> None:
        """memory: owned from now on."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.num_bytes = num_blocks * self.block_bytes
        self._memory: PoolMemory | None = memory
        self._pages: PagesAhead | None = None
        flat = torch.frombuffer(memory.buffer, dtype=torch.uint8)  # [num_blocks * block_bytes]
        self._tensor: Tensor | None = flat.view(num_blocks, self.block_bytes)

    @property
    def tensor(self) -> Tensor:
        """All bytes as uint8 [num_blocks, block_bytes]."""
        assert self._tensor is not None, "the pool is closed"
        return self._tensor

    @property
    def buffer(self) -> memoryview:
        """All bytes, flat and writable; block b is [b * block_bytes, (b + 1) * block_bytes)."""
        return self.memory.buffer

    @property
    def memory(self) -> PoolMemory:
        """See Storage.memory."""
        assert self._memory is not None, "the pool is closed"
        return self._memory

    def block_buffer(self, block: int) -> memoryview:
        """The bytes of one block."""
        return self.buffer[block * self.block_bytes : (block + 1) * self.block_bytes]

    def layer_views(self, group: int = 0) -> list[KVView]:
        """One strided view for each layer of a group, in the group's order."""
        return views_of_layers(self.layout, self.tensor, group)

    def bring_in(self, group: int, block: BlockId, first_layer: int, num_layers: int) -> None:
        """See Staging.bring_in: movers write where kernels read."""

    def bring_out(
        self, group: int, blocks: Sequence[BlockId], first_layer: int, num_layers: int
    ) -> None:
        """See Staging.bring_out: movers read where kernels write."""

    def note_used(self, num_blocks: int, *, is_idle: bool) -> None:
        """See Storage.note_used. The first call begins it."""
        if self._pages is None:
            self._pages = PagesAhead(self.memory, self.block_bytes)
        self._pages.note_used(num_blocks, is_idle=is_idle)

    def close(self) -> None:
        """Let go of the memory. Idempotent.

        Views that others still hold stay valid; the kernel takes the pages back when the last one is gone.
        """
        if self._pages is not None:
            self._pages.close()
        if self._memory is not None:
            self._memory.close()
        self._tensor = self._memory = None


def views_of_layers(layout: KVLayout, pool: Tensor, group: int) -> list[KVView]:
    """One strided view for each layer of a group, in the group's order. pool: uint8 `[num_blocks, block_bytes]`."""
    spec = layout.groups[group]
    return [
        KVView(_values(layout, pool, spec, place), _scales(layout, pool, spec, place))
        for place in range(len(spec.layers))
    ]


def _values(layout: KVLayout, pool: Tensor, group: KVGroup, place: int) -> Tensor:
    """The elements of one layer: [num_blocks, num_kv_heads, 2, block_size, head_dim]."""
    block_size, slot = layout.block_size, group.slot
    elements = pool.view(ELEMENT_TYPES[slot.dtype])  # [num_blocks, elements of a block]
    size = (len(pool), group.num_kv_heads, 2, block_size, slot.head_dim)
    half = block_size * slot.head_dim
    slab = group.slab_bytes(block_size) // slot.element_bytes
    stride = (elements.shape[1], slab, half, slot.head_dim, 1)
    return elements.as_strided(size, stride, place * group.num_kv_heads * slab)


def _scales(layout: KVLayout, pool: Tensor, group: KVGroup, place: int) -> Tensor | None:
    """The scales of one layer: [num_blocks, num_kv_heads, 2, block_size]."""
    block_size, slot = layout.block_size, group.slot
    if not slot.has_scales:
        return None
    scales = pool.view(torch.float32)  # [num_blocks, block_bytes / SCALE_BYTES]
    slab = group.slab_bytes(block_size) // SCALE_BYTES
    first = slot.scales_offset_bytes(block_size) // SCALE_BYTES
    size = (len(pool), group.num_kv_heads, 2, block_size)
    stride = (scales.shape[1], slab, block_size, 1)
    return scales.as_strided(size, stride, place * group.num_kv_heads * slab + first)


def allocate_pool(layout: KVLayout, num_blocks: int) -> PoolStorage:
    """Memory for `num_blocks` blocks of `layout`, all zero."""
    if num_blocks < 2:
        raise ConfigError(
            f"num_blocks: {num_blocks} must be at least 2 (block 0 is the null block)"
        )
    _check_alignment(layout)
    try:
        memory = PoolMemory(num_blocks, layout.block_bytes)
    except (OSError, ValueError, OverflowError) as error:
        wanted_bytes = num_blocks * layout.block_bytes
        raise ConfigError(f"KV pool: {wanted_bytes} bytes cannot be mapped: {error}") from error
    return PoolStorage(layout, num_blocks, memory)


def _check_alignment(layout: KVLayout) -> None:
    """Every slab, and the scales in it, must start where its elements may start."""
    for group in layout.groups:
        wanted = group.slot.alignment_bytes
        slab_bytes = group.slab_bytes(layout.block_size)
        for name, num_bytes in (("block_bytes", layout.block_bytes), ("slab bytes", slab_bytes)):
            if num_bytes % wanted:
                raise ConfigError(
                    f"{name}: {num_bytes} must be a multiple of {wanted}, which {group.slot.dtype} asks for"
                )
