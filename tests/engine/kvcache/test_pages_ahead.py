"""Memory ahead of use: there before it is touched, no more of it than is said, and no need of a kernel that can."""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.kvcache import pages_ahead
from engine.kvcache.pages_ahead import PagesAhead
from kvtransfer.pool_memory import PoolMemory
from tests.support.engines import EngineHarness
from tests.support.nodes import wait_until


def _can_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(pages_ahead._MADV_POPULATE_WRITE)
        except OSError:
            return False
        return True


pytestmark = pytest.mark.skipif(
    not _can_populate(), reason="needs a kernel that populates memory on request, Linux 5.14"
)

BLOCK_BYTES = 256 << 10
NUM_BLOCKS = 65
AHEAD_BYTES = 4 << 20


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    made = PoolMemory(NUM_BLOCKS, BLOCK_BYTES)
    yield made
    made.close()


@contextmanager
def pages_of(memory: PoolMemory) -> Iterator[PagesAhead]:
    pages = PagesAhead(memory, BLOCK_BYTES, AHEAD_BYTES)
    try:
        yield pages
    finally:
        pages.close()


def populated_bytes(memory: PoolMemory) -> int:
    return os.fstat(memory.descriptor).st_blocks * 512


def wait_for_bytes(memory: PoolMemory, num_bytes: int) -> None:
    wait_until(
        lambda: populated_bytes(memory) >= num_bytes,
        f"{num_bytes} bytes are there",
        20.0,
        lambda: f"but {populated_bytes(memory)}",
    )


def test_some_blocks_beyond_those_in_use_are_ready(memory: PoolMemory) -> None:
    with pages_of(memory) as pages:
        assert populated_bytes(memory) < 1 << 20, "nothing before somebody asks"
        for num_used in (1, 20, 40):
            pages.note_used(num_used, is_idle=True)
            wanted = memory.header_bytes + num_used * BLOCK_BYTES + AHEAD_BYTES
            wait_for_bytes(memory, wanted)
            assert populated_bytes(memory) < wanted + (1 << 20), "a piece more at most"
        assert not any(memory.buffer), "still zero"


def test_it_ends_with_the_pool(memory: PoolMemory) -> None:
    whole = memory.header_bytes + NUM_BLOCKS * BLOCK_BYTES
    with pages_of(memory) as pages:
        pages.note_used(NUM_BLOCKS - 1, is_idle=True)
        wait_for_bytes(memory, whole)
        wait_until(lambda: not _threads(), "the thread ends")
        pages.note_used(NUM_BLOCKS, is_idle=True)
        assert populated_bytes(memory) == whole


def test_beside_work_only_what_is_nearly_used_up_is_renewed(memory: PoolMemory) -> None:
    with pages_of(memory) as pages:
        pages.note_used(1, is_idle=True)
        wait_for_bytes(memory, 5 << 20)  # header, a block and what is ahead, in whole pieces
        pages.note_used(15, is_idle=False)
        time.sleep(0.05)
        assert populated_bytes(memory) == 5 << 20, "a quarter is left"
        pages.note_used(16, is_idle=False)
        wait_for_bytes(memory, 6 << 20)
        time.sleep(0.05)
        assert populated_bytes(memory) == 6 << 20, "a quarter is there again"
        pages.note_used(16, is_idle=True)
        wait_for_bytes(memory, 9 << 20)


def test_work_that_comes_stops_it(memory: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    populate = PagesAhead._populate_piece
    busy_from_bytes = 2 << 20

    def populate_and_be_asked(pages: PagesAhead) -> bool:
        done = populate(pages)
        if pages._populated_bytes == busy_from_bytes:
            pages.note_used(1, is_idle=False)
        return done

    monkeypatch.setattr(PagesAhead, "_populate_piece", populate_and_be_asked)
    with pages_of(memory) as pages:
        pages.note_used(1, is_idle=True)
        wait_for_bytes(memory, busy_from_bytes)
        time.sleep(0.05)
        assert populated_bytes(memory) == busy_from_bytes
        pages.note_used(1, is_idle=True)
        wait_for_bytes(memory, 5 << 20)


def test_what_is_written_meanwhile_stays(memory: PoolMemory) -> None:
    with pages_of(memory) as pages:
        pages.note_used(NUM_BLOCKS, is_idle=True)
        for block in range(NUM_BLOCKS):
            memory.buffer[block * BLOCK_BYTES] = block
        wait_for_bytes(memory, NUM_BLOCKS * BLOCK_BYTES)
        assert [memory.buffer[block * BLOCK_BYTES] for block in range(NUM_BLOCKS)] == list(
            range(NUM_BLOCKS)
        )


def test_a_kernel_that_cannot_leaves_it_to_the_first_touch(
    memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_ahead, "_MADV_POPULATE_WRITE", 1 << 20)
    with pages_of(memory) as pages:
        pages.note_used(NUM_BLOCKS, is_idle=True)
        wait_until(lambda: not _threads(), "the thread ends")
        assert populated_bytes(memory) < 1 << 20
        memory.buffer[-1] = 1
        pages.note_used(NUM_BLOCKS, is_idle=True)


def test_an_engine_populates_while_it_is_idle_and_ends_that_with_itself() -> None:
    engine = EngineHarness()
    memory = engine.storage.memory
    try:
        engine.turn()
        wait_for_bytes(memory, len(memory.mapping) // mmap.PAGESIZE * mmap.PAGESIZE)
    finally:
        engine.close()
    assert not _threads()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-pages"]
