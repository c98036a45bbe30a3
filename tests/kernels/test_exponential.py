"""The exponential function of the sampling rule: its steps restated in plain Python, bit by bit, and how true it is."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference.exponential import PIECE, exponentiate
from tests.support.sampling_rule import restated_exp

LEAST = -708.0
ERROR_ULP = 1.5
"""Of the reduced argument, of the series' last product and sum, of the coefficients: about a unit in the last place."""

exponents = st.one_of(
    st.floats(LEAST, 0.0),
    st.floats(-1.0, 0.0),
    st.floats(-1e-9, 0.0),
    # about halfway between whole numbers of ln 2, where the rounding to one of them may go either way
    st.builds(
        lambda n, off: max(LEAST, -(n + 0.5) * math.log(2) * (1 + off * 2.0**-52)),
        st.integers(0, 1020),
        st.integers(-3, 3),
    ),
)


def exp(values: list[float]) -> list[float]:
    result = torch.tensor(values, dtype=torch.float64)
    exponentiate(result, scratch())
    return result.tolist()


def scratch() -> Tensor:
    return torch.full((3, PIECE), math.nan, dtype=torch.float64)


@given(values=st.lists(exponents, min_size=1, max_size=50))
def test_it_is_its_steps(values: list[float]) -> None:
    assert exp(values) == [restated_exp(value) for value in values]


@given(value=exponents)
def test_it_is_the_exponential_function(value: float) -> None:
    (result,) = exp([value])
    with localcontext(prec=50):
        error = abs(Decimal(result) - Decimal(value).exp())
    assert error <= Decimal(ERROR_ULP * math.ulp(result))
    assert 0.0 < result <= 1.0


def test_ends_of_its_range() -> None:
    below = math.nextafter(LEAST, -math.inf)
    assert exp([0.0, -0.0, below, -1e300, -math.inf]) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert exp([LEAST])[0] > 0.0
    assert math.isnan(exp([math.nan])[0])


def test_a_number_has_the_same_bits_wherever_it_stands() -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.rand(2 * PIECE + 77, generator=generator, dtype=torch.float64) * LEAST
    together = numbers.clone()
    exponentiate(together, scratch())
    for start, count in ((0, 1), (PIECE - 3, 7), (2 * PIECE, 77)):
        own = numbers[start : start + count].clone()
        exponentiate(own, scratch())
        assert torch.equal(own, together[start : start + count])
