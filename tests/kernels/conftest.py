"""What holds for every test of the kernels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """Numbers drawn without a generator do not depend on which tests ran before."""
    torch.manual_seed(11)
