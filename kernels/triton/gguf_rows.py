"""Rows of GGUF blocks expanded to numbers: all of a weight, or those that token ids name."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.gguf_quants import quant, scale_and_least
from kernels.triton.launch import launch
from kernels.triton.numerics import narrow
from kernels.triton.tuning import ELEMENTWISE_BLOCK
from kernels.weights import BlockWeight

PLAIN_FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""GGUF types whose blocks are one plain element."""


@triton.jit
def _expand_kernel(
    raw_ptr,
    ids_ptr,
    output_ptr,
    raw_stride,
    num_columns,
    FORMAT: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output[r, c] = element c of row r, or of row ids[r]."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_IDS:
        source = tl.load(ids_ptr + row).to(tl.int64)
    # Beyond the last column the last is read again: blocks end where the weight ends.
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.minimum(column, num_columns - 1)
    block = raw_ptr + source * raw_stride + index // BLOCK_ELEMENTS * BLOCK_BYTES
    index = index % BLOCK_ELEMENTS
    scale, least = scale_and_least(block, index, FORMAT)
    numbers = quant(block, index, FORMAT).to(tl.float32) * scale + least
    target = output_ptr + row * num_columns + column
    tl.store(target, narrow(numbers, output_ptr.dtype.element_ty), mask=column < num_columns)


def expand(weight: BlockWeight, row_ids: Tensor | None = None) -> Tensor:
    """The elements of a weight's rows `[rows, num_columns]`, the reference's bits; row_ids: which, `[rows]`."""
    name = weight.block_format.name
    if name in PLAIN_FORMATS:
        raw = weight.raw if row_ids is None else weight.raw.index_select(0, row_ids)
        return raw.contiguous().view(PLAIN_FORMATS[name]).to(weight.dtype)
    num_rows = weight.shape[0] if row_ids is None else len(row_ids)
    num_columns = weight.shape[1]
    assert weight.raw.stride(1) == 1, "rows of blocks are contiguous"
    output = torch.empty(num_rows, num_columns, dtype=weight.dtype, device=weight.raw.device)
    block = min(ELEMENTWISE_BLOCK, triton.next_power_of_2(num_columns))
    launch(
        _expand_kernel,
        (num_rows, triton.cdiv(num_columns, block)),
        weight.raw,
        weight.raw if row_ids is None else row_ids,  # never read where there are none
        output,
        weight.raw.stride(0),
        num_columns,
        FORMAT=name,
        BLOCK_ELEMENTS=weight.block_format.block_elements,
        BLOCK_BYTES=weight.block_format.block_bytes,
        HAS_IDS=row_ids is not None,
        BLOCK=block,
        num_warps=4,
        fp_fusion=False,
    )
    return output
