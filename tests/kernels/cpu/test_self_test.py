"""A variant whose bits differ is passed over and named; one that was asked for is refused."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import Tensor

from core.errors import ConfigError
from kernels.cpu import self_test
from kernels.cpu.backend import HostBackend
from kernels.cpu.eager import Eager
from kernels.cpu.team import Team, variants
from kernels.kv_view import KVView
from kernels.step import StepMetadata
from kernels.weights import Weight


class FaultyProducts(Eager):
    """Wrong in the last bit of one output, from the second row block on."""

    def linear(self, inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        result = super().linear(inputs, weight, bias)
        if len(result) > 16:
            result[16, 34:].view(torch.int32).bitwise_xor_(1)
        return result


class FaultyCache(Eager):
    """Leaves the last slot unwritten."""

    def write_kv(self, key: Tensor, value: Tensor, layer: KVView, metadata: StepMetadata) -> None:
        super().write_kv(key, value, layer, metadata)
        layer.values[-1, :, :, 5] = torch.zeros((), dtype=layer.values.dtype)


def plain() -> Eager:
    return Eager(Team(1, self_test.PLAIN))


def faulty_best(name: str) -> str:
    return "norm of 1 rows" if name == variants()[0] else ""


def test_every_variant_of_this_machine_passes() -> None:
    assert variants()[-1] == self_test.PLAIN
    assert {name: self_test.difference(name) for name in variants()} == dict.fromkeys(
        variants(), ""
    )


def test_one_bit_in_one_row_is_found() -> None:
    fault = self_test.first_difference(FaultyProducts(Team(1, variants()[0])), plain())
    assert fault == "dense product of 17 rows"


def test_what_is_written_to_the_cache_is_compared() -> None:
    fault = self_test.first_difference(FaultyCache(Team(1, variants()[0])), plain())
    assert fault == "attention over float32: what is written"


def test_a_faulty_variant_is_passed_over_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    assert len(variants()) > 1, "every x86-64 machine of today has AVX2"
    with caplog.at_level(logging.WARNING):
        backend = HostBackend(1, judge=faulty_best)
    best, next_best = variants()[:2]
    phrase = f"{best} passed over: its norm of 1 rows differs from that of plain"
    assert backend.team.variant == next_best
    assert backend.description == f"cpu ({next_best}, 1 threads; {phrase})"
    assert phrase in caplog.text


def test_a_faulty_variant_that_was_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"{variants()[0]} passed over: its norm of 1 rows"):
        HostBackend(1, variants()[0], judge=faulty_best)
    HostBackend(1, variants()[1], judge=faulty_best)


def test_it_costs_little() -> None:
    def cpu_seconds() -> float:
        started = time.process_time()
        assert not self_test.first_difference(Eager(Team(1)), plain())
        return time.process_time() - started

    assert min(cpu_seconds() for _ in range(5)) < 0.05
