"""What the interpreter gets wrong and the kernels work around, so that a release that mends it is noticed.

Compiled code has none of the workarounds: the constant that chooses them is fixed when the kernels are built.
"""

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton.numerics import dot, narrow
from tests.support.triton_device import IS_INTERPRETED, on_device

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="about the interpreter")


@triton.jit
def _product_kernel(left_ptr, right_ptr, output_ptr, IS_OURS: tl.constexpr):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    left, right = tl.load(left_ptr + row * 16 + column), tl.load(right_ptr + row * 16 + column)
    zero = tl.zeros([16, 16], dtype=tl.float32)
    if IS_OURS:
        product = dot(left, right, zero)
    else:
        product = tl.dot(left, right, zero)
    tl.store(output_ptr + row * 16 + column, product)


@triton.jit
def _narrow_kernel(source_ptr, target_ptr, IS_OURS: tl.constexpr):
    place = tl.arange(0, 16)
    numbers = tl.load(source_ptr + place)
    if IS_OURS:
        narrowed = narrow(numbers, tl.bfloat16)
    else:
        narrowed = numbers.to(tl.bfloat16)
    tl.store(target_ptr + place, narrowed)


def product(*, is_ours: bool) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = (torch.randn(16, 16).to(torch.bfloat16) for _ in range(2))
    output = torch.empty(16, 16)
    _product_kernel[(1,)](on_device(left), on_device(right), output, IS_OURS=is_ours)
    return output, left.float() @ right.float()


def test_a_plain_product_of_bfloat16_is_wrong_here_and_ours_is_right() -> None:
    output, expected = product(is_ours=False)
    assert float((output - expected).abs().max()) > 1e6  # it multiplies the bit patterns
    output, expected = product(is_ours=True)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_a_row_of_our_product_has_the_same_bits_wherever_it_stands() -> None:
    left, right = torch.randn(16, 16), torch.randn(16, 16)
    output, turned = torch.empty(16, 16), torch.empty(16, 16)
    _product_kernel[(1,)](on_device(left), on_device(right), output, IS_OURS=True)
    _product_kernel[(1,)](on_device(left.flip(0)), on_device(right), turned, IS_OURS=True)
    assert torch.equal(turned.flip(0), output)
    torch.testing.assert_close(output, left @ right, atol=1e-5, rtol=1e-5)


def narrowed(*, is_ours: bool) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randn(16, generator=torch.Generator().manual_seed(0))
    source[:4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    target = torch.empty(16, dtype=torch.bfloat16)
    _narrow_kernel[(1,)](source, target, IS_OURS=is_ours)
    return target, source.to(torch.bfloat16)


def test_a_plain_cast_to_bfloat16_truncates_here_and_ours_rounds() -> None:
    target, expected = narrowed(is_ours=False)
    assert not torch.equal(target[4:], expected[4:])
    target, expected = narrowed(is_ours=True)
    torch.testing.assert_close(target, expected, atol=0, rtol=0, equal_nan=True)
