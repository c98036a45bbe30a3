"""The exponential function of sampling: its steps are part of the rule, so that every machine draws the same tokens.

Libraries differ in the last bit of exp, one library between processors. Here each step is one operation on float64,
rounded to nearest even, and no product is fused with a sum:

    n    = x * LOG2_E, rounded to a whole number by adding and subtracting 1.5 x 2**52
    r    = x - n * LN2_HIGH - n * LN2_LOW                      the first product and difference are exact
    p    = the series 1 + r + r**2 / 2! + ... + r**13 / 13!    by Horner's rule from the highest power
    exp  = p * 2**n                                            exact

for x in [-708, 0], and 0 below. The result is within a unit in the last place or two, is 1 for 0, and never above 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIECE = 16_384
"""Numbers worked on at a time, so that they and their scratch memory stay in cache."""

_LEAST = -708.0
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 32 bits: times a whole number of 11 bits it is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_ROUNDING = 1.5 * 2.0**52
_SERIES = [1.0 / math.factorial(power) for power in range(13, -1, -1)]
_EXPONENT_BIAS, _FRACTION_BITS = 1023, 52


def exponentiate(values: Tensor, scratch: Tensor) -> None:
    """exp of float64 numbers `[n]` that are not above 0, in place. scratch: float64 `[3, PIECE]`."""
    for start in range(0, len(values), PIECE):
        piece = values[start : start + PIECE]
        _exponentiate(piece, *scratch[:, : len(piece)])


def _exponentiate(x: Tensor, shifted: Tensor, whole: Tensor, result: Tensor) -> None:
    is_zero = x < _LEAST
    r = x.clamp_(min=_LEAST)
    torch.mul(r, _LOG2_E, out=shifted).add_(_ROUNDING)
    torch.sub(shifted, _ROUNDING, out=whole)
    r.sub_(torch.mul(whole, _LN2_HIGH, out=result)).sub_(whole.mul_(_LN2_LOW))
    torch.mul(r, _SERIES[0], out=result).add_(_SERIES[1])
    for coefficient in _SERIES[2:]:
        result.mul_(r).add_(coefficient)
    # The whole number stands in the last bits of `shifted`: moved up, it is the exponent of 2**n.
    power = shifted.view(torch.int64).add_(_EXPONENT_BIAS).bitwise_left_shift_(_FRACTION_BITS)
    torch.mul(result, power.view(torch.float64), out=x).masked_fill_(is_zero, 0.0)
