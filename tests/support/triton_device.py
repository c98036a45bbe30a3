"""Where the tests of kernels/triton run: in the interpreter, or on the card that BATON_KERNEL_DEVICE=cuda names.

tests/conftest.py makes triton use its interpreter before anything imports it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

DEVICE = torch.device(os.environ.get("BATON_KERNEL_DEVICE", "cpu"))
IS_INTERPRETED = DEVICE.type == "cpu"

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Absolute and relative, of a result of each type: two units in the last place of the half types."""


def on_device(tensor: Tensor) -> Tensor:
    """A copy where the kernels run."""
    return tensor.to(DEVICE, copy=True)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Equal within the tolerance of the actual's type, every element written."""
    allowed = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.cpu().double(), expected.double(), atol=allowed, rtol=allowed)


@contextmanager
def batch_invariance() -> Iterator[None]:
    """The process's choice, for a while."""
    from kernels.triton.settings import use_batch_invariance

    use_batch_invariance(True)
    try:
        yield
    finally:
        use_batch_invariance(False)
