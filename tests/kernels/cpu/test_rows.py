"""Row operations of the host kernels: the reference's numbers, equal bits on every variant, nothing left unwritten."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from tests.support.host_kernels import examples, on_every_variant
from tests.support.poison import poisoned_memory

SIZES = {"rows": st.integers(1, 70), "width": st.integers(1, 150), "seed": st.integers(0, 999)}


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@examples(40)
@given(**SIZES)
def test_rms_norm(rows: int, width: int, seed: int) -> None:
    hidden, weight = normal(seed, rows, width), normal(seed + 1, width)
    with poisoned_memory():
        actual = on_every_variant(lambda backend: backend.rms_norm(hidden, weight, 1e-5))
    assert_near(actual, reference.rms_norm(hidden, weight, 1e-5), 2e-6)


@examples(40)
@given(**SIZES)
def test_add_rms_norm(rows: int, width: int, seed: int) -> None:
    hidden, residual, weight = (
        normal(seed + i, *shape) for i, shape in enumerate(((rows, width),) * 2 + ((width,),))
    )

    def run(index: int) -> Tensor:
        return on_every_variant(
            lambda backend: backend.add_rms_norm(hidden, residual.clone(), weight, 1e-5)[index]
        )

    with poisoned_memory():
        normed, total = run(0), run(1)
    expected = reference.add_rms_norm(hidden, residual.clone(), weight, 1e-5)
    assert_near(normed, expected[0], 2e-6)
    assert torch.equal(total, expected[1])


@examples(20)
@given(heads=st.integers(1, 5), **SIZES)
def test_rms_norm_of_heads_inside_a_wider_row(rows: int, width: int, heads: int, seed: int) -> None:
    wide, weight = normal(seed, rows, heads + 2, width), normal(seed + 1, width)
    own = wide[:, 1 : heads + 1]
    actual = on_every_variant(lambda backend: backend.rms_norm(own, weight, 1e-6))
    assert_near(actual, reference.rms_norm(own, weight, 1e-6), 2e-6)


@examples(40)
@given(scale=st.sampled_from((0.1, 3.0, 60.0)), **SIZES)
def test_gates(rows: int, width: int, seed: int, scale: float) -> None:
    gate_up = normal(seed, rows, 2 * width, scale=scale)
    with poisoned_memory():
        silu = on_every_variant(lambda backend: backend.silu_mul(gate_up))
        gelu = on_every_variant(lambda backend: backend.gelu_mul(gate_up))
    assert_near(silu, reference.silu_mul(gate_up), 2e-6)
    # in float32 the tanh of a gate below -4 or so is -1, and what is left of 1 + tanh times a large input is missed
    assert_near(gelu, reference.gelu_mul(gate_up.double()).float(), 2e-6)


@examples(30)
@given(half=st.integers(1, 40), rows=st.integers(1, 50), seed=st.integers(0, 999))
def test_rotation(half: int, rows: int, seed: int) -> None:
    positions = torch.randint(0, 131_072, (rows,), generator=torch.Generator().manual_seed(seed))
    frequencies = 1.0 / (10_000.0 ** (torch.arange(half) / half))
    heads = normal(seed, rows, 3, 2 * half)
    with poisoned_memory():
        cos, sin = (
            on_every_variant(lambda b, i=i: b.rope_angles(positions, frequencies, 1.25)[i])  # type: ignore[misc]
            for i in range(2)
        )
        rotated = on_every_variant(lambda backend: backend.rope(heads, cos, sin))
    for own, function in ((cos, math.cos), (sin, math.sin)):
        angles = positions.float()[:, None] * frequencies
        exact = torch.tensor([[1.25 * function(a) for a in row] for row in angles.tolist()])
        torch.testing.assert_close(own, exact, rtol=0, atol=2.5e-7)
    assert_near(rotated, reference.rope(heads, cos, sin), 1e-6)


@examples(40)
@given(rows=st.integers(1, 40), width=st.integers(1, 1100), seed=st.integers(0, 999))
def test_argmax_takes_the_lowest_of_equals(rows: int, width: int, seed: int) -> None:
    logits = normal(seed, rows, width).mul_(3).round_()  # many equals
    with poisoned_memory():
        actual = on_every_variant(lambda backend: backend.argmax(logits))
    assert actual.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_argmax_of_rows_where_all_but_one_is_banned() -> None:
    logits = torch.full((3, 700), float("-inf"))
    logits[0, 699] = logits[1, 0] = logits[2, 255] = -5.0
    assert on_every_variant(lambda backend: backend.argmax(logits)).tolist() == [699, 0, 255]
