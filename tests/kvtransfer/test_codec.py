"""Slabs in another format against the kernel that converts whole blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.kv_layout import KV_DTYPES, SlotFormat
from kernels.kv_view import ELEMENT_TYPES, KVView
from kernels.reference.cache import convert_kv
from kvtransfer.codec import convert_slabs

DTYPES = sorted(KV_DTYPES)


def slabs_of(view: KVView) -> bytes:
    """The slabs of a view of one block: K, V and their scales of each head."""
    rows = [view.values[0].reshape(view.num_kv_heads, -1).contiguous().view(torch.uint8)]
    if view.scales is not None:
        rows.append(view.scales[0].reshape(view.num_kv_heads, -1).contiguous().view(torch.uint8))
    return torch.cat(rows, dim=1).numpy().tobytes()


def random_view(dtype: str, num_slabs: int, num_slots: int, head_dim: int, seed: int) -> KVView:
    """One block of random numbers, held in a KV dtype."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(1, num_slabs, 2, num_slots, head_dim, generator=generator) * 3
    wide = KVView(numbers)
    view = empty_view(dtype, wide)
    convert_kv(wide, [0], view, [0])
    return view


def empty_view(dtype: str, like: KVView) -> KVView:
    """Room for the numbers of a view in a KV dtype."""
    scales = torch.empty(like.values.shape[:-1]) if SlotFormat.of(dtype, 1).has_scales else None
    return KVView(torch.empty(like.values.shape, dtype=ELEMENT_TYPES[dtype]), scales)


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_converted_slabs_are_what_the_kernel_writes(
    source: str, destination: str, num_slabs: int, num_slots: int, head_dim: int, seed: int
) -> None:
    view = random_view(source, num_slabs, num_slots, head_dim, seed)
    expected = empty_view(destination, view)
    convert_kv(view, [0], expected, [0])
    formats = SlotFormat.of(source, head_dim), SlotFormat.of(destination, head_dim)
    converted = convert_slabs(slabs_of(view), num_slots, *formats)
    assert converted.tobytes() == slabs_of(expected)
    assert len(converted) == num_slabs * num_slots * formats[1].slot_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"])
def test_a_wider_format_and_back_loses_nothing(dtype: str) -> None:
    bits = np.arange(256 if dtype.startswith("fp8") else 65536)
    elements = bits.astype(np.uint8 if dtype.startswith("fp8") else np.uint16)
    numbers = torch.from_numpy(elements.view(np.uint8).copy()).view(ELEMENT_TYPES[dtype])
    payload = elements[~numbers.float().isnan().numpy()]
    if dtype.startswith("fp8"):  # what clamps is no number of the format
        is_finite = numbers.float().isfinite().numpy()
        payload = elements[is_finite]
    payload = payload[: len(payload) // 4 * 4]
    narrow, wide = SlotFormat.of(dtype, 2), SlotFormat.of("float32", 2)
    there = convert_slabs(payload.tobytes(), 1, narrow, wide)
    assert convert_slabs(there, 1, wide, narrow).tobytes() == payload.tobytes()
