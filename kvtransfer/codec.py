"""Slabs from one slot format into another, as they go over the wire.

What comes out is what a pool of the new format would hold, had it been given the numbers of the old one in float32:
so where the new format holds every number of the old one, nothing is lost. Runs on mover threads, in plain torch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from core.kv_layout import SlotFormat
from kernels.kv_view import ELEMENT_TYPES, KVView
from kernels.reference.kv_formats import dequantize, quantize


def convert_slabs(
    payload: bytes | bytearray | memoryview,
    num_slots: int,
    source: SlotFormat,
    destination: SlotFormat,
) -> memoryview:
    """Slabs of `num_slots` slots each, one behind the other, in another format; of any number."""
    values, scales = _parts(payload, num_slots, source)
    numbers = dequantize(values, scales, torch.float32)  # [slabs, 2, slots, D]
    like = KVView(
        torch.empty(0, dtype=ELEMENT_TYPES[destination.dtype]),
        torch.empty(0) if destination.has_scales else None,
    )
    kept, kept_scales = quantize(numbers, like)
    rows = [_as_bytes(kept)]
    if kept_scales is not None:
        rows.append(_as_bytes(kept_scales))
    return np.concatenate(rows, axis=1).reshape(-1).data


def _parts(
    payload: bytes | bytearray | memoryview, num_slots: int, slot: SlotFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements `[slabs, 2, slots, D]` and scales `[slabs, 2, slots]` of slabs."""
    slabs = np.frombuffer(payload, np.uint8).reshape(-1, slot.slot_bytes * num_slots)
    elements_end = slot.scales_offset_bytes(num_slots)
    elements = torch.from_numpy(slabs[:, :elements_end].copy())  # its own memory, so aligned
    values = elements.view(ELEMENT_TYPES[slot.dtype]).reshape(-1, 2, num_slots, slot.head_dim)
    if not slot.has_scales:
        return values, None
    scales = torch.from_numpy(slabs[:, elements_end:].copy()).view(torch.float32)
    return values, scales.reshape(-1, 2, num_slots)


def _as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """`[slabs, ...]` as bytes `[slabs, bytes of one]`."""
    flat = tensor.reshape(tensor.shape[0], -1).contiguous()
    rows: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return rows
