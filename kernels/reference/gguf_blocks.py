"""GGUF blocks to floating point, as the format defines them.

Arithmetic is float32 throughout, in the order of the format's definition, so that two processes that expand the same
file hold equal weights, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gguf_formats import BlockFormat
from kernels.gguf_quants import unpack

_CHUNK_ROWS = 2048  # bounds the temporaries of one pass to a few MB


def dequantize(raw: Tensor, block_format: BlockFormat, dtype: torch.dtype) -> Tensor:
    """Rows of blocks `[num_rows, row_bytes]` (uint8) to values `[num_rows, num_columns]` of `dtype`, in own memory."""
    if block_format.block_elements == 1:
        return raw.contiguous().view(_PLAIN[block_format.name]).to(dtype, copy=True)
    num_rows, row_bytes = raw.shape
    num_columns = row_bytes // block_format.block_bytes * block_format.block_elements
    values = torch.empty(num_rows, num_columns, dtype=dtype)
    for first in range(0, num_rows, _CHUNK_ROWS):
        values[first : first + _CHUNK_ROWS] = _expand(
            raw[first : first + _CHUNK_ROWS], block_format
        )
    return values


def _expand(raw: Tensor, block_format: BlockFormat) -> Tensor:
    quants = unpack(raw, block_format)
    values = quants.values.float()  # [num_rows, num_columns]
    if quants.offset:
        values -= quants.offset
    groups = values.view(values.shape[0], -1, quants.group)
    groups *= quants.scales[:, :, None]
    if quants.least is not None:
        groups += quants.least[:, :, None]
    return values


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
