"""Rows of random GGUF blocks whose scales are finite and small."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.gguf_formats import FORMATS, BlockFormat
from kernels.weights import BlockWeight

QUANTIZED_FORMATS = tuple(f.name for f in FORMATS if f.block_elements > 1)

_HALF_OFFSETS = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block's float16 fields begin; byte 0 where nothing is said."""


def random_bytes(
    block_format: BlockFormat, num_rows: int, blocks_a_row: int, seed: int = 7
) -> npt.NDArray[np.uint8]:
    """`[num_rows, row_bytes]`."""
    generator = np.random.default_rng(seed)
    if block_format.block_elements == 1:
        return _plain_bytes(block_format, generator.standard_normal((num_rows, 64 * blocks_a_row)))
    shape = (num_rows * blocks_a_row, block_format.block_bytes)
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    for offset in _HALF_OFFSETS.get(block_format.name, (0,)):
        halves = generator.standard_normal((shape[0], 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def random_blocks(
    block_format: BlockFormat, num_rows: int, blocks_a_row: int, seed: int = 7
) -> BlockWeight:
    """The same as a weight that expands to float32."""
    raw = torch.from_numpy(random_bytes(block_format, num_rows, blocks_a_row, seed))
    return BlockWeight(raw, block_format, torch.float32)


def _plain_bytes(
    block_format: BlockFormat, values: npt.NDArray[np.float64]
) -> npt.NDArray[np.uint8]:
    if block_format.name == "F16":
        return values.astype(np.float16).view(np.uint8)
    single = values.astype(np.float32)
    if block_format.name == "F32":
        return single.view(np.uint8)
    high_halves = single.view(np.uint16).reshape(*single.shape, 2)[..., 1]
    return np.ascontiguousarray(high_halves).view(np.uint8)
