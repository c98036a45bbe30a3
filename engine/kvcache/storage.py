"""The bytes of a KV pool: `[num_blocks, block_bytes]` in one shared mapping.

Owns the memory. Kernels see it as one strided tensor a layer, movers as one flat memoryview; both are views, nothing
is ever copied here. The memory is a memfd, zero at birth and populated as it is touched, so that a pool larger than
what is used costs nothing, and so that its descriptor can be handed to another process later. Knows nothing of what
a block holds or who may write it: that is `core.blocks` and `BlockPool`.
"""

from __future__ import annotations

import mmap
import os

import torch

from core.errors import ConfigError
from core.kv_layout import KVLayout

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class PoolStorage:
    """One pool's memory and the views of it.

    layout: how a block is laid out.
    num_blocks: blocks, the null block included.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, descriptor: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.num_bytes = num_blocks * self.block_bytes
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = mmap.mmap(descriptor, self.num_bytes)
        flat = torch.frombuffer(self._mapping, dtype=torch.uint8)  # [num_blocks * block_bytes]
        self._tensor: torch.Tensor | None = flat.view(num_blocks, self.block_bytes)
        self._buffer: memoryview | None = memoryview(self._mapping)

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes as uint8 [num_blocks, block_bytes]."""
        assert self._tensor is not None, "the pool is closed"
        return self._tensor

    @property
    def buffer(self) -> memoryview:
        """All bytes, flat and writable; block b is [b * block_bytes, (b + 1) * block_bytes)."""
        assert self._buffer is not None, "the pool is closed"
        return self._buffer

    @property
    def descriptor(self) -> int:
        """The memfd behind the pool; owned here, to be duplicated by whoever hands it on."""
        assert self._descriptor >= 0, "the pool is closed"
        return self._descriptor

    def block_buffer(self, block: int) -> memoryview:
        """The bytes of one block."""
        return self.buffer[block * self.block_bytes : (block + 1) * self.block_bytes]

    def layer_views(self, group: int = 0) -> list[torch.Tensor]:
        """One strided view for each layer of a group, in the group's order.

        Each is [num_blocks, num_kv_heads, 2, block_size, head_dim]; index 0 of the third axis is K, 1 is V.
        """
        spec = self.layout.groups[group]
        block_size, head_dim = self.layout.block_size, spec.slot.head_dim
        elements = self.tensor.view(_DTYPES[spec.slot.dtype])  # [num_blocks, elements of a block]
        half = block_size * head_dim
        slab = 2 * half
        size = (self.num_blocks, spec.num_kv_heads, 2, block_size, head_dim)
        stride = (elements.shape[1], slab, half, head_dim, 1)
        layer_elements = spec.num_kv_heads * slab
        return [
            elements.as_strided(size, stride, storage_offset=layer * layer_elements)
            for layer in range(len(spec.layers))
        ]

    def close(self) -> None:
        """Let go of the memory. Idempotent.

        Views that others still hold stay valid; the kernel takes the pages back when the last one is gone.
        """
        self._tensor = self._buffer = self._mapping = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def allocate_pool(layout: KVLayout, num_blocks: int) -> PoolStorage:
    """Memory for `num_blocks` blocks of `layout`, all zero."""
    if num_blocks < 2:
        raise ConfigError(
            f"num_blocks: {num_blocks} must be at least 2 (block 0 is the null block)"
        )
    _check_alignment(layout)
    descriptor = os.memfd_create("baton-kv-pool", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_blocks * layout.block_bytes)
        return PoolStorage(layout, num_blocks, descriptor)
    except (OSError, ValueError) as error:
        os.close(descriptor)
        wanted_bytes = num_blocks * layout.block_bytes
        raise ConfigError(f"KV pool: {wanted_bytes} bytes cannot be mapped: {error}") from error


def _check_alignment(layout: KVLayout) -> None:
    for group in layout.groups:
        element_bytes = _DTYPES[group.slot.dtype].itemsize
        if layout.block_bytes % element_bytes:
            raise ConfigError(
                f"block_bytes: {layout.block_bytes} must be a multiple of {element_bytes}, "
                f"the size of {group.slot.dtype}"
            )
