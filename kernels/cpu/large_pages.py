"""Memory in large pages, so that a step that reads all weights seldom waits for the address of a page.

The kernel is asked for them; where it has none, the same memory comes in small ones.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_LARGE_PAGE = 2 << 20
_PIECE_BYTES = 16 << 20
_ALIGNMENT = 64


def large_pages(num_bytes: int) -> Tensor:
    """`[num_bytes]` uint8, zero, beginning at a large page; what is not touched takes no memory."""
    size = -(-max(num_bytes, 1) // _LARGE_PAGE) * _LARGE_PAGE
    # One page more: the kernel places a mapping at any small one.
    mapping = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without large pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # who shares a piece may or may not be in that mode
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        first = -whole.data_ptr() % _LARGE_PAGE
        return whole[first : first + num_bytes]


class WeightMemory:
    """Places weights one after the other in pieces of large pages, whichever thread asks.

    A piece is given back when the last weight in it is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8, zero, at an address that is a multiple of 64."""
        with self._lock:
            if self._used + num_bytes > len(self._piece):
                self._piece, self._used = large_pages(max(num_bytes, _PIECE_BYTES)), 0
            taken = self._piece[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return taken


weight_memory = WeightMemory()
"""The process's own."""
