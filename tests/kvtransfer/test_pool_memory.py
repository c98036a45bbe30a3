"""A pool's memory between processes: what its header promises, and whom it does not believe."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest

from core.blocks import BlockLife
from core.errors import TransferError
from core.ids import BlockId
from kvtransfer.pool_memory import PeerPool, PoolMemory

READER = """
import sys
from kvtransfer.pool_memory import PeerPool
pool = PeerPool(int(sys.argv[1]))
print(pool.num_blocks, pool.block_bytes, pool.generations[2], bytes(pool.buffer[200:203]), pool.is_gone)
"""


def test_another_process_sees_bytes_and_generations() -> None:
    memory = PoolMemory(5, 100)
    life = BlockLife(5, memory.generations)
    for _ in range(3):
        life.allocate(BlockId(2))
        life.abort(BlockId(2))
    memory.buffer[200:203] = b"abc"
    descriptor = os.dup(memory.descriptor)
    run = subprocess.run(
        [sys.executable, "-c", READER, str(descriptor)],
        pass_fds=[descriptor], capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert run.stdout.split(maxsplit=3) == ["5", "100", "3", "b'abc' False\n"]
    os.close(descriptor)
    memory.close()


def test_a_reader_cannot_write_and_nobody_can_shrink_it() -> None:
    memory = PoolMemory(3, 4096)
    peer = PeerPool(os.dup(memory.descriptor))
    with pytest.raises(TypeError):
        peer.buffer[0] = 1
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)
    peer.close()
    memory.close()


def test_what_the_owner_has_closed_is_gone_to_its_readers() -> None:
    memory = PoolMemory(3, 4096)
    peer = PeerPool(os.dup(memory.descriptor))
    assert not peer.is_gone
    memory.close()
    memory.close()
    assert peer.is_gone
    peer.close()


def _unsealed() -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 16)
    return descriptor


def _pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def _lying(field: int, value: int) -> Callable[[], int]:
    def make() -> int:
        memory = PoolMemory(3, 4096)
        struct.pack_into("<I" if field < 16 else "<Q", memory.mapping, field, value)
        descriptor = os.dup(memory.descriptor)
        memory.close()
        return descriptor

    return make


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_unsealed, "not sealed"),
        (_pipe, "cannot be mapped"),
        (_lying(0, 7), "begins with"),
        (_lying(8, 2), "version 2"),
        (_lying(12, 8192), "bytes of"),
        (_lying(16, 1 << 40), "bytes of"),
        (_lying(24, 2), "bytes of"),
        (_lying(24, 1 << 60), "bytes of"),
    ],
)
def test_memory_that_is_no_pool_is_refused_and_closed(make: Callable[[], int], reason: str) -> None:
    descriptor = make()
    with pytest.raises(TransferError, match=reason):
        PeerPool(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
