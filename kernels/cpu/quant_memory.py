"""Memory for quantised rows."""

from __future__ import annotations

import torch

from kernels.cpu.binding import QuantRows

LEAST_ROWS = 16  # the matrix units read whole tiles of rows
_GROUP = 32


class QuantMemory:
    """Room for `num_rows` rows of up to `width` quantised values, zero at birth."""

    def __init__(self, num_rows: int, width: int) -> None:
        assert num_rows >= LEAST_ROWS, "a tile of rows fits"
        groups = width // _GROUP
        self._values = torch.zeros(num_rows, 2 * width, dtype=torch.int8)
        self._scales = torch.zeros(num_rows, groups)
        self._sums = torch.zeros(num_rows, 3 * groups, dtype=torch.int32)
        self._weighted = torch.zeros(num_rows, 3 * groups)

    def rows(self, width: int) -> QuantRows:
        """Rows of `width` values at the start of the memory."""
        parts = (self._values, self._scales, self._sums, self._weighted)
        return QuantRows(*(part.data_ptr() for part in parts), width)
