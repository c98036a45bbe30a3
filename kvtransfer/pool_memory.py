"""The memory of a KV pool as several processes of one host see it.

A memfd: a header of whole pages, then the blocks. The header says what follows and holds a generation a block, which
the owner's engine thread raises before a block is used anew (`core.blocks.BlockLife.allocate`). So another process
that has copied bytes out of a block reads its generation again: where it is still the one that was announced, the
bytes are those that were meant.

    header = | magic 8 | version u32 | header_bytes u32 | block_bytes u64 | num_blocks u64 | epoch 16 | to 64: 0 |
             | generation of each block, u64 | to header_bytes: 0 |

The size is sealed: nobody can take memory away under a process that reads it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct

from core.errors import TransferError

MAGIC = b"BATONKVP"
VERSION = 1
_FIXED = struct.Struct("<8sIIQQ16s16x")
EPOCH_AT = 32
"""Where in the header the epoch lies."""

GENERATIONS_AT = _FIXED.size
"""Where in the header the generation of block 0 lies; the others follow, GENERATION_BYTES each."""

GENERATION_BYTES = 8
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
EPOCH_BYTES = 16
_GONE = bytes(EPOCH_BYTES)


class PoolMemory:
    """Memory for `num_blocks` blocks of `block_bytes` bytes, all zero; owned here. Raises OSError where there is none.

    Populated as it is touched, or as its owner makes it ready, so that a pool larger than what is used costs little.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        header_bytes = header_bytes_of(num_blocks)
        num_bytes = num_blocks * block_bytes
        self.header_bytes = header_bytes
        self._descriptor = os.memfd_create("baton-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, header_bytes + num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            self.mapping = mmap.mmap(self._descriptor, header_bytes + num_bytes)
        except (OSError, ValueError):
            os.close(self._descriptor)
            raise
        self.epoch = secrets.token_bytes(EPOCH_BYTES)
        _FIXED.pack_into(
            self.mapping, 0, MAGIC, VERSION, header_bytes, block_bytes, num_blocks, self.epoch
        )
        whole = memoryview(self.mapping)
        self.buffer = whole[header_bytes:]
        self.generations = _generations(whole, num_blocks)

    @property
    def descriptor(self) -> int:
        """The memfd; owned here, to be duplicated by whoever hands it on."""
        assert self._descriptor >= 0, "the pool is closed"
        return self._descriptor

    def close(self) -> None:
        """Tell those who read it that it is gone, and let go of the descriptor. Idempotent.

        Views that others still hold stay valid; the kernel takes the pages back when the last one is gone.
        """
        if self._descriptor >= 0:
            _write_epoch(self.mapping, _GONE)
            os.close(self._descriptor)
            self._descriptor = -1


class PeerPool:
    """Another process's PoolMemory, read only.

    Raises TransferError where the descriptor is not one, or can be cut short while it is read.
    """

    def __init__(self, descriptor: int) -> None:
        """descriptor: closed here."""
        try:
            self._mapping = _map_sealed(descriptor)
        except (OSError, ValueError) as error:
            raise TransferError(f"a pool's memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        size = len(self._mapping)
        fields = _FIXED.unpack_from(self._mapping)
        magic, version, header_bytes, self.block_bytes, self.num_blocks, epoch = fields
        self.epoch: bytes = epoch
        wanted = header_bytes + self.num_blocks * self.block_bytes
        if (magic, version) != (MAGIC, VERSION) or size != wanted:
            raise TransferError(
                f"a pool's memory begins with {magic!r}, version {version}, and has {size} bytes of {wanted}"
            )
        if header_bytes != header_bytes_of(self.num_blocks):
            raise TransferError(f"a pool's memory has a header of {header_bytes} bytes")
        whole = memoryview(self._mapping)
        self.buffer = whole[header_bytes:]
        self.generations = _generations(whole, self.num_blocks)

    @property
    def is_gone(self) -> bool:
        """Whether its owner has closed it: nothing in it means anything now."""
        epoch: bytes = self._mapping[EPOCH_AT : EPOCH_AT + EPOCH_BYTES]
        return epoch != self.epoch

    def close(self) -> None:
        """Let go of the memory; views that are still in use keep it until they go. Idempotent."""
        self.buffer.release()
        self.generations.release()
        try:
            self._mapping.close()
        except BufferError:
            pass  # the collector closes it with the last view


def num_blocks_within(num_bytes: int, block_bytes: int) -> int:
    """The most blocks whose PoolMemory, header included, takes no more than `num_bytes`; 0 where none fits."""
    num_blocks = max(0, num_bytes) // (block_bytes + GENERATION_BYTES)
    while num_blocks and header_bytes_of(num_blocks) + num_blocks * block_bytes > num_bytes:
        num_blocks -= 1
    return num_blocks


def header_bytes_of(num_blocks: int) -> int:
    """Whole pages in front of the blocks."""
    used = _FIXED.size + num_blocks * GENERATION_BYTES
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _generations(whole: memoryview, num_blocks: int) -> memoryview:
    return whole[_FIXED.size : _FIXED.size + num_blocks * GENERATION_BYTES].cast("Q")


def _write_epoch(mapping: mmap.mmap, epoch: bytes) -> None:
    mapping[EPOCH_AT : EPOCH_AT + EPOCH_BYTES] = epoch


def _map_sealed(descriptor: int) -> mmap.mmap:
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
        raise ValueError("its size is not sealed")
    size = os.fstat(descriptor).st_size
    if size < _FIXED.size:
        raise ValueError(f"it has {size} bytes")
    return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
