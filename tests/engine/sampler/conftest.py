"""What holds of the sampler holds on the reference and on the host kernels."""

from __future__ import annotations

from functools import cache

import pytest

from kernels import ops, reference
from kernels.cpu.backend import HostBackend


@cache
def host() -> HostBackend:
    return HostBackend(2)


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def _backend(request: pytest.FixtureRequest, _reference_kernels: None) -> None:
    ops.use_backend(reference if request.param == "reference" else host())
