"""Rotary positions: one program a row of a step, all its heads at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.numerics import narrow
from kernels.triton.tuning import row_warps


@triton.jit
def _rope_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    output_ptr,
    row_stride,
    head_stride,
    num_heads,
    half_dim,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """(a, b) -> (a cos - b sin, b cos + a sin) for element i and element i + half_dim, in float32."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    element = tl.arange(0, BLOCK_HALF)[None, :]
    is_angle = element < half_dim
    is_element = (head < num_heads) & is_angle
    cos = tl.load(cos_ptr + row * half_dim + element, mask=is_angle, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * half_dim + element, mask=is_angle, other=0.0).to(tl.float32)
    source = heads_ptr + row * row_stride + head * head_stride + element
    first = tl.load(source, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(source + half_dim, mask=is_element, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    target = output_ptr + (row * num_heads + head) * (2 * half_dim) + element
    tl.store(target, narrow(first * cos - second * sin, dtype), mask=is_element)
    tl.store(target + half_dim, narrow(second * cos + first * sin, dtype), mask=is_element)


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.ops.rope`."""
    num_rows, num_heads, head_dim = heads.shape
    assert heads.stride(-1) == 1, "heads are contiguous"
    rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
    launch(
        _rope_kernel,
        (num_rows,),
        heads,
        cos.contiguous(),
        sin.contiguous(),
        rotated,
        heads.stride(0),
        heads.stride(1),
        num_heads,
        head_dim // 2,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=row_warps(num_heads * head_dim),
    )
    return rotated
