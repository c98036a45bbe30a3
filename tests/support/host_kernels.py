"""The host backend in its variants, and how two of them are compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from hypothesis import settings
from torch import Tensor

from kernels.cpu.backend import HostBackend
from kernels.cpu.team import variants

NUM_THREADS = 2


def examples(count: int) -> settings:
    """At most `count` examples: fewer where the profile in use allows fewer."""
    return settings(max_examples=min(count, settings().max_examples))


@cache
def backends() -> tuple[HostBackend, ...]:
    """One backend for each variant that runs here, best first; the last one is plain C++."""
    return tuple(HostBackend(NUM_THREADS, name) for name in variants())


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Every element the same float, NaN refused."""
    assert not expected.float().isnan().any(), f"{what}: an element was never written"
    assert torch.equal(actual, expected), (
        f"{what}: {int((actual != expected).sum())} of {expected.numel()} elements differ"
    )


def on_every_variant(run: Callable[[HostBackend], Tensor]) -> Tensor:
    """What `run` gives, having given the same bits on every variant of this machine."""
    plain = run(backends()[-1])
    for backend in backends()[:-1]:
        assert_same_bits(run(backend), plain, backend.description)
    return plain
