"""GGUF blocks taken apart: small integers, and what turns them into numbers.

Every quantised format is the same rule with its own packing: `(quant - offset) * scale + least`, where scale and least
are shared by a group of 16 or 32 consecutive columns. Backends that compute on the integers start from here;
`kernels.reference.gguf_blocks` expands them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gguf_formats import BlockFormat


@dataclass(frozen=True, slots=True)
class Quants:
    """Rows of a quantised matrix, taken apart. G = num_columns / group.

    values: `[num_rows, num_columns]` uint8.
    scales: `[num_rows, G]` float32.
    least: `[num_rows, G]` float32, or None where it is 0 everywhere.
    offset: the quant that stands for `least`.
    group: columns that share a scale.
    bits: bits that every value fits in.
    has_half_scales: whether scales and least are float16 numbers, so that 16 bits hold them exactly.
    """

    values: Tensor
    scales: Tensor
    least: Tensor | None
    offset: int
    group: int
    bits: int
    has_half_scales: bool


def unpack(raw: Tensor, block_format: BlockFormat) -> Quants:
    """Take rows of blocks `[num_rows, row_bytes]` (uint8) apart."""
    num_rows = raw.shape[0]
    blocks = raw.reshape(-1, block_format.block_bytes)
    values, scales, least = _UNPACKERS[block_format.name](blocks)
    offset, group, bits = _SHAPES[block_format.name]
    return Quants(
        values=values.view(num_rows, -1),
        scales=scales.reshape(num_rows, -1),
        least=None if least is None else least.reshape(num_rows, -1),
        offset=offset,
        group=group,
        bits=bits,
        has_half_scales=block_format.block_elements == 32,
    )


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte `offset` of each block, as float32 `[num_blocks, 1]`."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves: `[num_blocks, 2 * num_bytes]`, uint8."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """32 bits, least significant first, as values 0 or 16: `[num_blocks, 32]`, uint8."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, :, None] >> shifts) & 1).reshape(-1, 32) << 4


def _bit_pairs(packed: Tensor) -> Tensor:
    """Two-bit fields of 32-byte groups, one plane of 32 after the other: `[num_blocks, 4 * num_bytes]`."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    groups = packed.reshape(packed.shape[0], -1, 1, 32)
    return ((groups >> shifts) & 3).reshape(packed.shape[0], -1)


def _nibble_runs(packed: Tensor) -> Tensor:
    """Nibbles of 32-byte groups: low halves of a group, then its high halves: `[num_blocks, 256]`."""
    groups = packed.reshape(-1, 4, 1, 32)
    return torch.cat((groups & 0x0F, groups >> 4), dim=2).reshape(-1, 256)


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits each (Q4_K and Q5_K), times those of the block; minima negated."""
    packed = blocks[:, 4:16]
    low_scale, low_least, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat((low_scale & 0x3F, (rest & 0x0F) | ((low_scale >> 2) & 0x30)), dim=1)
    least = torch.cat((low_least & 0x3F, (rest >> 4) | ((low_least >> 2) & 0x30)), dim=1)
    return _half(blocks, 0) * scale.float(), -(_half(blocks, 2) * least.float())


Parts = tuple[Tensor, Tensor, Tensor | None]  # quants, scales, least


def _q4_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return quants, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:] ^ 0x80, _half(blocks, 0), None  # a signed byte plus 128


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16]
    scale = _half(blocks, 80) * (scales & 0x0F).float()
    least = -(_half(blocks, 82) * (scales >> 4).float())
    return _bit_pairs(blocks[:, 16:80]), scale, least


def _q3_k(blocks: Tensor) -> Parts:
    high_mask, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low_scales = _nibbles(packed[:, :8])  # [num_blocks, 16]
    high_shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 4, 1)
    high_scales = ((packed[:, None, 8:] >> high_shifts) & 3).reshape(-1, 16)
    scales = (low_scales | (high_scales << 4)).float() - 32
    bit = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = ((high_mask[:, None, :] >> bit) & 1).reshape(-1, 256)
    return _bit_pairs(low) | (high << 2), _half(blocks, 108) * scales, None


def _q4_k(blocks: Tensor) -> Parts:
    return _nibble_runs(blocks[:, 16:]), *_six_bit_scales(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    bit = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = ((blocks[:, None, 16:48] >> bit) & 1).reshape(-1, 256)
    return _nibble_runs(blocks[:, 48:]) | (high << 4), *_six_bit_scales(blocks)


def _q6_k(blocks: Tensor) -> Parts:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 0x0F, low >> 4), dim=2).reshape(-1, 256)
    high = _bit_pairs(blocks[:, 128:192])
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return low | (high << 4), scale, None


_UNPACKERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

_SHAPES = {  # offset, group, bits
    "Q4_0": (8, 32, 4),
    "Q4_1": (0, 32, 4),
    "Q5_0": (16, 32, 5),
    "Q5_1": (0, 32, 5),
    "Q8_0": (128, 32, 8),
    "Q2_K": (0, 16, 2),
    "Q3_K": (4, 16, 3),
    "Q4_K": (0, 32, 4),
    "Q5_K": (0, 32, 5),
    "Q6_K": (32, 16, 6),
}
"""Of each format: the quant that stands for zero (before `least`), columns a scale, bits a quant."""
