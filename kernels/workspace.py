"""Scratch memory of operations, kept between steps so that the path of a step allocates none."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Float64 memory that grows to the largest request. One thread, one result at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float64)

    def take(self, *shape: int) -> Tensor:
        """A contiguous float64 tensor of this shape, its content undefined; valid until the next call."""
        wanted = 1
        for size in shape:
            wanted *= size
        if len(self._memory) < wanted:
            self._memory = torch.empty(wanted, dtype=torch.float64)
        return self._memory[:wanted].view(shape)
