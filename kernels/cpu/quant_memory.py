"""Memory for quantised rows."""

from __future__ import annotations

import torch

from kernels.cpu.structs import QuantRows

LEAST_ROWS = 16  # the matrix units read whole tiles of rows
_GROUP, _SUMS = 32, 7  # columns whose sums are kept, and how many of them
_PLANE_BYTES = 64


class QuantMemory:
    """Room for `num_rows` rows of up to `width` quantised values, zero at birth.

    thread_rows: how many of them each thread has for itself where operations are joined; 0: they are shared.
    """

    def __init__(self, num_rows: int, width: int, thread_rows: int = 0) -> None:
        assert num_rows >= LEAST_ROWS, "a tile of rows fits"
        self._own = (thread_rows, width)
        plane = -(-width // _PLANE_BYTES) * _PLANE_BYTES
        self._values = torch.zeros(num_rows, 2 * plane, dtype=torch.int8)
        self._scales = torch.zeros(num_rows)
        self._sums = torch.zeros(num_rows, _SUMS * width // _GROUP, dtype=torch.int32)

    def rows(self, width: int) -> QuantRows:
        """Rows of `width` values at the start of the memory."""
        parts = (self._values, self._scales, self._sums)
        return QuantRows(*(part.data_ptr() for part in parts), width, *self._own)
