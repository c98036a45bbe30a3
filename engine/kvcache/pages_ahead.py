"""Memory of blocks that have never been used, made ready before they are.

A pool's pages come from the kernel when they are first touched: a fault each, and the time to clear them, which on a
virtual machine that has to ask its host is several times that of the write itself. A step, or a run that arrives,
would wait for it. So a thread keeps some of what follows the highest block in use populated, if it can while the
engine is idle. A pool larger than what is used still costs no more than that.
"""

from __future__ import annotations

import ctypes
import threading

from kvtransfer.pool_memory import PoolMemory

AHEAD_BYTES = 64 << 20
"""What is kept ready: a prompt of 2,000 tokens of a small model, and a fraction of a second of clearing."""

_PIECE_BYTES = 1 << 20
"""Of one call, during which nobody else's memory of this process may change: a millisecond."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14


class PagesAhead:
    """Populates a pool's memory in the order of its blocks. `note_used` and `close` belong to one thread."""

    def __init__(
        self, memory: PoolMemory, block_bytes: int, ahead_bytes: int = AHEAD_BYTES
    ) -> None:
        """memory: stays open until `close`."""
        self._block_bytes, self._ahead_bytes = block_bytes, ahead_bytes
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(memory.mapping))
        self._first_byte, self._num_bytes = memory.header_bytes, len(memory.mapping)
        self._libc = ctypes.CDLL(None)
        self._used_bytes = self._populated_bytes = 0
        self._is_idle = False
        self._is_closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
        self._thread.start()

    def note_used(self, num_blocks: int, *, is_idle: bool) -> None:
        """So many blocks, from the first on, are in use or have been. Cheap; the work is the thread's.

        is_idle: whether nobody waits for the cores that the work takes. Else only what is nearly used up is renewed.
        """
        self._used_bytes = self._first_byte + num_blocks * self._block_bytes
        self._is_idle = is_idle
        if self._may_go_on():
            self._wake.set()

    def close(self) -> None:
        """Stop, within a piece. Idempotent."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()

    def _may_go_on(self) -> bool:
        ahead_bytes = self._ahead_bytes if self._is_idle else self._ahead_bytes // 4
        wanted_bytes = min(self._used_bytes + ahead_bytes, self._num_bytes)
        return self._populated_bytes < wanted_bytes

    def _run(self) -> None:
        while self._populated_bytes < self._num_bytes:
            self._wake.wait()
            self._wake.clear()
            while self._may_go_on():
                if self._is_closing or not self._populate_piece():
                    return
            if self._is_closing:
                return

    def _populate_piece(self) -> bool:
        """Whether the kernel could; one that is too old for it leaves all else to be touched."""
        size = min(_PIECE_BYTES, self._num_bytes - self._populated_bytes)
        place, advice = ctypes.c_void_p(self._start + self._populated_bytes), _MADV_POPULATE_WRITE
        result: int = self._libc.madvise(place, ctypes.c_size_t(size), advice)
        self._populated_bytes += size
        return result == 0
