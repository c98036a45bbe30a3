"""What is done once a step and needs no kernel of its own: torch's operations, on the device of their inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import elementwise


def rope_angles(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.rope_angles`. The angles lie where the positions do."""
    return elementwise.rope_angles(positions, frequencies.to(positions.device), factor, dtype)


def take_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """See `kernels.ops.take_rows`."""
    return elementwise.take_rows(hidden, rows.to(hidden.device))
