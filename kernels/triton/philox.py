"""Counter-based random numbers, as `kernels.reference.philox` defines them, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.philox import PURPOSE_SAMPLE
from kernels.triton.launch import default_device, launch

_BLOCK = 128
_SIGN_BIT = 1 << 63


@triton.jit
def _uniforms_kernel(
    seeds_ptr, positions_ptr, choices_ptr, output_ptr, purpose, num_rows, BLOCK: tl.constexpr
):
    """The top 53 bits of the first two of four words of Philox-4x32-10, as a fraction in float64."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    seed = tl.load(seeds_ptr + row, mask=is_row, other=0)
    position = tl.load(positions_ptr + row, mask=is_row, other=0).to(tl.uint32)
    choice = tl.load(choices_ptr + row, mask=is_row, other=0).to(tl.uint32)
    zero = position * 0
    word0, word1, _word2, _word3 = tl.philox(seed, position, choice, zero + purpose, zero)
    bits = (word0.to(tl.uint64) << 21) | (word1.to(tl.uint64) >> 11)
    tl.store(output_ptr + row, bits.to(tl.float64) * 1.1102230246251565e-16, mask=is_row)


def uniforms(
    seeds: Sequence[int],
    positions: Sequence[int],
    choices: Sequence[int],
    purpose: int = PURPOSE_SAMPLE,
) -> Tensor:
    """See `kernels.ops.uniforms`."""
    num_rows, device = len(seeds), default_device()
    signed = [(seed ^ _SIGN_BIT) - _SIGN_BIT for seed in seeds]  # the same 64 bits
    output = torch.empty(num_rows, dtype=torch.float64, device=device)
    launch(
        _uniforms_kernel,
        (triton.cdiv(num_rows, _BLOCK),),
        torch.tensor(signed, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor(choices, dtype=torch.int64, device=device),
        output,
        purpose,
        num_rows,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return output
