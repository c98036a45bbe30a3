"""Weights in the order the host kernels read: panels of 16 outputs, repacked once when a model is loaded.

A quantised panel holds, for each group of columns, its quants and then 16 scales (and 16 minima): one stream of memory
for a product of few rows, one tile of the matrix units for a product of many. Quants are bytes [4 columns' quads, 16
outputs, 4 columns]; two quads share a byte where four bits are enough.

Four-bit weights whose groups have 32 columns become whole numbers, slope * (quant - 8) + middle, with one scale an
output, rounded so that they reach 8,191. Their products need no scale before the end (docs/decisions/0005).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from core.errors import ModelLoadError
from kernels.cpu.large_pages import weight_memory
from kernels.cpu.structs import NativeWeight, WeightKind
from kernels.gguf_quants import Quants, unpack
from kernels.weights import (
    BlockWeight,
    ChannelWeight,
    DenseWeight,
    GroupWeight,
    PackedWeight,
    RowWeight,
    StackedWeight,
    Weight,
)

PANEL = 16  # outputs
_CHUNK_PANELS = 64  # bounds the temporaries of one pass
_INT8_GROUP = 32
_WHOLE_GROUP = 32
_LEAST_REACH = 1e-30  # rows of smaller weights count as zeros
_WHOLE_LEVELS = 8183  # 8 * half + half below 8191: slope and middle are both rounded

_DENSE_KINDS = {
    torch.float32: WeightKind.DENSE_F32,
    torch.float16: WeightKind.DENSE_F16,
    torch.bfloat16: WeightKind.DENSE_BF16,
}


@dataclass(frozen=True, slots=True, eq=False)
class HostWeight:
    """A packed weight.

    data: its panels. row_scales: `[num_rows]` of whole weights. native: what the kernels are given, pointing into both.
    """

    data: Tensor
    native: NativeWeight
    row_scales: Tensor | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether its products take quantised inputs."""
        return bool(self.native.kind >= WeightKind.QUANT_4)


@dataclass(frozen=True, slots=True, eq=False)
class HostStack:
    """Packed weights over the same inputs whose rows follow each other but whose formats differ."""

    parts: tuple[HostWeight, ...]


def pack(weight: Weight) -> PackedWeight:
    """The weight in panels; a packed one is itself."""
    if isinstance(weight, PackedWeight):
        return weight
    if isinstance(weight, StackedWeight):
        parts = tuple(_pack_rows(part) for part in weight.parts)
        return PackedWeight(HostStack(parts), weight.shape)
    return PackedWeight(_pack_rows(weight), weight.shape)


def _pack_rows(weight: RowWeight) -> HostWeight:
    if isinstance(weight, DenseWeight):
        return _pack_dense(weight.values)
    if isinstance(weight, BlockWeight) and weight.block_format.block_elements == 1:
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return _pack_dense(weight.raw.contiguous().view(plain[weight.block_format.name]))
    return _pack_quants(weight)


def _pack_dense(values: Tensor) -> HostWeight:
    num_rows, num_columns = values.shape
    num_panels = -(-num_rows // PANEL)
    shape = (num_panels, num_columns, PANEL)
    memory = weight_memory.take(prod(shape) * values.element_size())
    data = memory.view(values.dtype).view(shape)
    for first in range(0, num_panels, _CHUNK_PANELS):
        rows = values[first * PANEL : (first + _CHUNK_PANELS) * PANEL]
        padded = _padded(rows)  # [panels of the chunk * 16, num_columns]
        chunk = padded.view(-1, PANEL, num_columns).transpose(1, 2)
        data[first : first + _CHUNK_PANELS] = chunk
    native = NativeWeight(
        data=data.data_ptr(),
        num_rows=num_rows,
        num_columns=num_columns,
        kind=_DENSE_KINDS[values.dtype],
    )
    return HostWeight(data, native)


def _pack_quants(weight: BlockWeight | ChannelWeight | GroupWeight) -> HostWeight:
    num_rows, num_columns = weight.shape
    num_panels = -(-num_rows // PANEL)
    data: Tensor | None = None
    row_scales = torch.zeros(num_rows)
    for first in range(0, num_panels, _CHUNK_PANELS):
        last = min((first + _CHUNK_PANELS) * PANEL, num_rows)
        quants = _quants_of(weight, first * PANEL, last)
        is_whole = quants.bits <= 4 and quants.group == _WHOLE_GROUP
        if is_whole:
            chunk, row_scales[first * PANEL : last] = _whole_panels(quants, first * PANEL)
        else:
            chunk = _panels(quants)  # [panels, groups, group_bytes]
        if data is None:
            shape = (num_panels, *chunk.shape[1:])
            data = weight_memory.take(prod(shape)).view(shape)
        data[first : first + chunk.shape[0]] = chunk
    assert data is not None, "a weight has rows"
    native = NativeWeight(
        data=data.data_ptr(),
        row_scales=row_scales.data_ptr() if is_whole else None,
        num_rows=num_rows,
        num_columns=num_columns,
        kind=WeightKind.QUANT_4 if quants.bits <= 4 else WeightKind.QUANT_8,
        group=quants.group,
        offset=quants.offset,
        has_min=quants.least is not None,
        half_scales=quants.has_half_scales,
    )
    if is_whole:
        native.kind = WeightKind.WHOLE_4
    return HostWeight(data, native, row_scales if is_whole else None)


def _quants_of(weight: BlockWeight | ChannelWeight | GroupWeight, first: int, last: int) -> Quants:
    """Rows [first, last) taken apart."""
    if isinstance(weight, BlockWeight):
        return unpack(weight.raw[first:last], weight.block_format)
    if isinstance(weight, ChannelWeight):
        values = weight.values[first:last]
        scales = weight.scales[first:last, None].expand(-1, values.shape[1] // _INT8_GROUP)
        unsigned = values.contiguous().view(torch.uint8) ^ 0x80
        return Quants(unsigned, scales.float(), None, 128, _INT8_GROUP, 8, False)
    packed = weight.packed[first:last]
    values = torch.stack((packed & 0x0F, packed >> 4), dim=2).flatten(1)
    repeats = weight.group_size // _INT8_GROUP
    scales = weight.scales[first:last].float()
    least = None
    if weight.zeros is not None:
        least = (-weight.zeros[first:last].float() * scales).repeat_interleave(repeats, dim=1)
    scales = scales.repeat_interleave(repeats, dim=1)
    offset = 8 if weight.zeros is None else 0
    return Quants(values, scales, least, offset, _INT8_GROUP, 4, False)


def _panels(quants: Quants) -> Tensor:
    """`[panels, groups, group_bytes]` uint8."""
    parts = [_quads(quants)]
    dtype = torch.float16 if quants.has_half_scales else torch.float32
    for numbers in (quants.scales, quants.least):
        if numbers is not None:
            parts.append(_lanes(numbers.to(dtype)).view(torch.uint8))
    return torch.cat(parts, dim=2)


def _whole_panels(quants: Quants, first_row: int) -> tuple[Tensor, Tensor]:
    """The same for whole weights, and the scale of each row. Raises ModelLoadError where there is none."""
    scales = quants.scales
    middle = scales * (8 - quants.offset)  # what a quant of 8 stands for
    if quants.least is not None:
        middle = middle + quants.least
    reach = torch.maximum((middle - 8 * scales).abs(), (middle + 7 * scales).abs()).amax(1)
    if bool((broken := ~torch.isfinite(reach)).any()):
        row = int(broken.nonzero()[0])
        raise ModelLoadError(
            f"row {first_row + row} of a weight reaches {reach[row]}: a block's scale is broken"
        )
    row_scales = torch.where(reach > _LEAST_REACH, reach / _WHOLE_LEVELS, 0.0)
    inverse = torch.where(row_scales > 0, 1 / row_scales, 0.0)[:, None]
    slopes, middles = (numbers.mul(inverse).round().to(torch.int16) for numbers in (scales, middle))
    pairs = torch.stack((_lanes(slopes), _lanes(middles)), dim=3)  # [panels, groups, 16, 2]
    return torch.cat((_quads(quants), pairs.flatten(2).view(torch.uint8)), dim=2), row_scales


def _quads(quants: Quants) -> Tensor:
    """The quants of every panel and group: `[panels, groups, bytes]`."""
    values, group = _padded(quants.values), quants.group
    num_panels, num_groups = values.shape[0] // PANEL, values.shape[1] // group
    quads = values.view(num_panels, PANEL, num_groups, group // 4, 4).permute(0, 2, 3, 1, 4)
    if quants.bits <= 4:
        quads = quads[:, :, 0::2] | (quads[:, :, 1::2] << 4)
    return quads.reshape(num_panels, num_groups, -1)


def _lanes(numbers: Tensor) -> Tensor:
    """A number for each row and group `[num_rows, groups]` as `[panels, groups, 16]`."""
    padded = _padded(numbers)
    return padded.view(-1, PANEL, padded.shape[1]).transpose(1, 2).contiguous()


def _padded(rows: Tensor) -> Tensor:
    """Rows, and zeros up to whole panels."""
    missing = -rows.shape[0] % PANEL
    if not missing:
        return rows
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))


def can_pack(weight: Weight) -> bool:
    """Whether the host kernels can take a weight: quantised inputs come in whole groups of 32 columns."""
    if isinstance(weight, StackedWeight):
        return all(can_pack(part) for part in weight.parts)
    if isinstance(weight, GroupWeight):
        return weight.group_size % _INT8_GROUP == 0
    if isinstance(weight, ChannelWeight):
        return weight.values.shape[1] % _INT8_GROUP == 0
    return True
