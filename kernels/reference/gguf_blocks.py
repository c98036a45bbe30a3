"""GGUF blocks to floating point, as the format defines them.

Each decoder takes raw blocks `[num_blocks, block_bytes]` (uint8) and returns values `[num_blocks, block_elements]`
(float32). Arithmetic is float32 throughout, in the order of the format's definition, so that two processes that
expand the same file hold equal weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.gguf_formats import BlockFormat

_CHUNK_ROWS = 2048  # bounds the temporaries of one decoding pass to a few MB


def dequantize(raw: Tensor, block_format: BlockFormat, dtype: torch.dtype) -> Tensor:
    """Rows of blocks `[num_rows, row_bytes]` (uint8) to values `[num_rows, num_columns]` of `dtype`, in own memory."""
    if block_format.block_elements == 1:
        return raw.contiguous().view(_PLAIN[block_format.name]).to(dtype, copy=True)
    num_rows, row_bytes = raw.shape
    num_columns = row_bytes // block_format.block_bytes * block_format.block_elements
    values = torch.empty(num_rows, num_columns, dtype=dtype)
    decode = _DECODERS[block_format.name]
    for first in range(0, num_rows, _CHUNK_ROWS):
        rows = raw[first : first + _CHUNK_ROWS]
        blocks = rows.reshape(-1, block_format.block_bytes)
        values[first : first + _CHUNK_ROWS] = decode(blocks).view(rows.shape[0], num_columns)
    return values


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


def _decode_q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _decode_q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _decode_q5_0(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (quants.float() - 16) * _half(blocks, 0)


def _decode_q5_1(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return quants.float() * _half(blocks, 0) + _half(blocks, 2)


def _decode_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _bit_pairs(packed: Tensor) -> Tensor:
    """Two-bit fields of 32-byte groups, one plane of 32 after the other: `[num_blocks, 4 * num_bytes]`."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    groups = packed.reshape(packed.shape[0], -1, 1, 32)
    return ((groups >> shifts) & 3).reshape(packed.shape[0], -1)


def _decode_q2_k(blocks: Tensor) -> Tensor:
    scales, quants = blocks[:, :16], _bit_pairs(blocks[:, 16:80])
    scale = _half(blocks, 80) * (scales & 0x0F).float()
    least = _half(blocks, 82) * (scales >> 4).float()
    values = scale[:, :, None] * quants.view(-1, 16, 16).float() - least[:, :, None]
    return values.view(-1, 256)


def _decode_q3_k(blocks: Tensor) -> Tensor:
    high_mask, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low_scales = _nibbles(packed[:, :8])  # [num_blocks, 16]
    high_shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 4, 1)
    high_scales = ((packed[:, None, 8:] >> high_shifts) & 3).reshape(-1, 16)
    scales = (low_scales | (high_scales << 4)).float() - 32
    bit = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    missing = (((high_mask[:, None, :] >> bit) & 1) ^ 1).reshape(-1, 256)  # 1 where 4 is subtracted
    quants = _bit_pairs(low).float() - 4 * missing.float()
    scale = _half(blocks, 108) * scales
    return (scale[:, :, None] * quants.view(-1, 16, 16)).view(-1, 256)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits each, from 12 bytes."""
    low_scale, low_least, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat((low_scale & 0x3F, (rest & 0x0F) | ((low_scale >> 2) & 0x30)), dim=1)
    least = torch.cat((low_least & 0x3F, (rest >> 4) | ((low_least >> 2) & 0x30)), dim=1)
    return scale.float(), least.float()


def _scale_32(blocks: Tensor, quants: Tensor) -> Tensor:
    """Eight runs of 32 quants, each with its own scale and minimum (Q4_K and Q5_K)."""
    scale, least = _six_bit_scales(blocks[:, 4:16])
    scale, least = _half(blocks, 0) * scale, _half(blocks, 2) * least
    values = scale[:, :, None] * quants.view(-1, 8, 32).float() - least[:, :, None]
    return values.view(-1, 256)


def _nibble_runs(packed: Tensor) -> Tensor:
    """Nibbles of 32-byte groups: low halves of a group, then its high halves: `[num_blocks, 256]`."""
    groups = packed.reshape(-1, 4, 1, 32)
    return torch.cat((groups & 0x0F, groups >> 4), dim=2).reshape(-1, 256)


def _decode_q4_k(blocks: Tensor) -> Tensor:
    return _scale_32(blocks, _nibble_runs(blocks[:, 16:]))


def _decode_q5_k(blocks: Tensor) -> Tensor:
    bit = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = ((blocks[:, None, 16:48] >> bit) & 1).reshape(-1, 256)
    return _scale_32(blocks, _nibble_runs(blocks[:, 48:]) | (high << 4))


def _decode_q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 0x0F, low >> 4), dim=2).reshape(-1, 256)
    high = _bit_pairs(blocks[:, 128:192])
    quants = (low | (high << 4)).float() - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (scale[:, :, None] * quants.view(-1, 16, 16)).view(-1, 256)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}
