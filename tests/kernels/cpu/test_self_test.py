"""A variant whose bits differ is passed over and named; one that was asked for is refused."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from core.errors import ConfigError
from kernels.cpu import self_test
from kernels.cpu.backend import HostBackend
from kernels.cpu.eager import Eager
from kernels.cpu.structs import Gated, Instruction, Norm, Op, Step
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


class FaultyHalves(Eager):
    """Wrong in the last bit of one number, where keys are read as they lie in memory."""

    def paged_attention(
        self, query: Tensor, layer: KVView, metadata: StepMetadata, scale: float, **options: Any
    ) -> Tensor:
        result = super().paged_attention(query, layer, metadata, scale, **options)
        if query.shape[-1] == 64 and layer.values.dtype == torch.float16:
            result[-1, -1, -1:].view(torch.int32).bitwise_xor_(1)
        return result


class FaultyDraws(Eager):
    """Takes the id beside one that was drawn."""

    def draw(self, *arguments: Any) -> Tensor:
        result = super().draw(*arguments)
        result[1] ^= 1
        return result


class FaultyMoves(Eager):
    """Loses the last byte of what it gathers."""

    def gather_blocks(self, pool: Tensor, block_ids: Sequence[int]) -> Tensor:
        staging = super().gather_blocks(pool, block_ids)
        staging[-1, -1] ^= 1
        return staging


class FaultyTeam(Team):
    """Wrong in the last bit of one scale of what an operation quantises beside its own work."""

    def __init__(self, op: Op) -> None:
        super().__init__(1, variants()[0])
        self._op = op

    def run(self, instructions: ctypes.Array[Instruction], count: int, step: Step) -> None:
        """One instruction at a time, so that something can happen in between."""
        for index in range(count):
            one = (Instruction * 1)(instructions[index])
            super().run(one, 1, step)
            kind = {Op.NORM: Norm, Op.GATED: Gated}.get(Op(one[0].op))
            if one[0].op != self._op or kind is None:
                continue
            quantised = kind.from_address(one[0].arguments).quantised
            if quantised.values:
                ctypes.c_uint32.from_address(quantised.scales).value ^= 1


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
    assert fault == "attention over float32 in heads of 64: what is written"


def test_attention_is_compared_for_each_way_that_keys_are_read() -> None:
    fault = self_test.first_difference(FaultyHalves(Team(1, variants()[0])), plain())
    assert fault == "attention over float16 in heads of 64 of 1 rows"


@pytest.mark.parametrize("op", [Op.NORM, Op.GATED])
def test_what_norms_and_gates_quantise_in_a_step_is_compared(op: Op) -> None:
    fault = self_test.first_difference(Eager(FaultyTeam(op)), plain())
    assert fault == "recorded step of 1 rows"


@pytest.mark.parametrize(("faulty", "name"), [(FaultyDraws, "draw"), (FaultyMoves, "moved blocks")])
def test_what_comes_after_a_step_is_compared(faulty: type[Eager], name: str) -> None:
    assert self_test.first_difference(faulty(Team(1, variants()[0])), plain()) == name


def test_every_operation_of_the_library_is_run() -> None:
    """But marks, which compute nothing."""
    ran: set[int] = set()

    class Watched(Team):
        def run(self, instructions: ctypes.Array[Instruction], count: int, step: Step) -> None:
            ran.update(instructions[index].op for index in range(count))
            super().run(instructions, count, step)

    assert not self_test.first_difference(Eager(Watched(1)), plain())
    assert ran == set(Op) - {Op.MARK}


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
