"""Memory that shows who reads it before it was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

POISON_BYTE = 0xFF
"""Makes every float type, fp8 included, a NaN; an int8 slot is poisoned by the scale beside it."""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN (integers their largest number) until somebody writes them."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(1).isnan()), "this build of torch does not fill new memory"
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
