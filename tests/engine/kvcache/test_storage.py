"""The pool's memory: views agree with the layout, byte for byte."""

from __future__ import annotations

import pytest
import torch

from core.errors import ConfigError
from core.kv_layout import KV_DTYPES, GroupKind, KVGroup, KVLayout, SlotFormat
from engine.kvcache.storage import allocate_pool

_EVERY_BYTE_ONE = {
    1: (torch.uint8, 0x01),
    2: (torch.int16, 0x0101),
    4: (torch.int32, 0x01010101),
}


def make_layout(num_layers: int = 3, dtype: str = "float32") -> KVLayout:
    full = KVGroup(GroupKind.FULL_ATTENTION, tuple(range(num_layers)), 2, SlotFormat.of(dtype, 8))
    return KVLayout(block_size=16, groups=(full,))


def test_memory_is_zero_and_has_the_size_of_the_layout() -> None:
    layout = make_layout()
    storage = allocate_pool(layout, 5)
    assert storage.tensor.shape == (5, layout.block_bytes)
    assert len(storage.buffer) == 5 * layout.block_bytes
    assert not storage.tensor.any()
    storage.close()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_layer_view_is_where_the_layout_says(dtype: str) -> None:
    layout = make_layout(dtype=dtype)
    storage = allocate_pool(layout, 4)
    views = [view.values for view in storage.layer_views(0)]
    assert len(views) == 3
    assert all(view.shape == (4, 2, 2, 16, 8) for view in views)
    views[1][2, 1, 0, 3, 5] = 3  # block 2, head 1, K, slot 3, element 5
    element_bytes = views[1].element_size()
    slab_bytes = layout.groups[0].slab_bytes(16)
    offset = 2 * layout.block_bytes + layout.layer_run(0, 1, 1).offset_bytes + slab_bytes
    offset += (3 * 8 + 5) * element_bytes
    found = torch.frombuffer(storage.buffer, dtype=views[1].dtype, offset=offset, count=1)
    assert found.item() == 3
    assert int((storage.tensor != 0).any(dim=1).sum()) == 1


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_views_tile_the_pool_to_the_byte(dtype: str) -> None:
    """Values and scales of all layers, taken together, name every byte of the used part exactly once."""
    layout = make_layout(dtype=dtype)
    storage = allocate_pool(layout, 3)
    for view in storage.layer_views(0):
        for part in (view.values, view.scales):
            if part is not None:
                integers, ones = _EVERY_BYTE_ONE[part.element_size()]
                part.view(integers).add_(ones)
    assert bool((storage.tensor == 1).all())


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_scales_lie_behind_both_runs_of_their_slab(dtype: str) -> None:
    layout = make_layout(dtype=dtype)
    storage = allocate_pool(layout, 4)
    (_, _, view) = storage.layer_views(0)
    assert view.scales is not None
    assert view.scales.shape == (4, 2, 2, 16)
    view.scales[1, 1, 1, 4] = 2.5  # block 1, head 1, V, slot 4
    slab_bytes = layout.groups[0].slab_bytes(16)
    offset = layout.block_bytes + layout.layer_run(0, 2, 1).offset_bytes + slab_bytes
    offset += 2 * 16 * 8 + (16 + 4) * 4
    found = torch.frombuffer(storage.buffer, dtype=torch.float32, offset=offset, count=1)
    assert found.item() == 2.5


@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3"])
def test_plain_views_have_no_scales(dtype: str) -> None:
    assert all(v.scales is None for v in allocate_pool(make_layout(dtype=dtype), 2).layer_views(0))


def test_scales_that_would_lie_between_addresses_are_refused() -> None:
    slot = SlotFormat.of("int8_per_token_head", 1)
    layout = KVLayout(1, (KVGroup(GroupKind.FULL_ATTENTION, (0,), 2, slot),))
    with pytest.raises(ConfigError, match="slab bytes: 10 must be a multiple of 4"):
        allocate_pool(layout, 3)


def test_a_layer_range_of_a_block_is_one_run() -> None:
    layout = make_layout()
    storage = allocate_pool(layout, 3)
    for layer, view in enumerate(storage.layer_views(0)):
        view.values[1] = float(layer + 1)
    run = layout.layer_run(0, 1, 2)
    middle = storage.block_buffer(1)[run.offset_bytes : run.offset_bytes + run.num_bytes]
    values = torch.frombuffer(middle, dtype=torch.float32)
    half = values.numel() // 2
    assert bool((values[:half] == 2.0).all())
    assert bool((values[half:] == 3.0).all())


def test_groups_share_blocks_and_are_padded_to_the_larger() -> None:
    slot = SlotFormat("plain", "float32", 8)
    wide = KVGroup(GroupKind.FULL_ATTENTION, (0, 2), 2, slot)
    narrow = KVGroup(GroupKind.SLIDING_WINDOW, (1,), 2, slot, window=64)
    storage = allocate_pool(KVLayout(16, (wide, narrow)), 3)
    (window_view,) = storage.layer_views(1)
    window_view.values[1] = 1.0
    used_bytes = int((storage.tensor[1].view(torch.float32) != 0).sum()) * 4
    assert used_bytes == narrow.used_bytes(16) < storage.block_bytes


def test_writes_through_the_buffer_are_seen_by_the_views() -> None:
    storage = allocate_pool(make_layout(), 3)
    view = storage.layer_views(0)[0].values
    storage.block_buffer(2)[0:4] = b"\x00\x00\x80\x3f"
    assert view[2, 0, 0, 0, 0].item() == 1.0


def test_views_outlive_close() -> None:
    storage = allocate_pool(make_layout(), 3)
    view, buffer = storage.layer_views(0)[0].values, storage.buffer
    storage.close()
    storage.close()
    view[1] = 7.0
    assert buffer[storage.block_bytes : storage.block_bytes + 4] == b"\x00\x00\xe0\x40"
    with pytest.raises(AssertionError):
        _ = storage.tensor


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ConfigError, match="num_blocks: 1 must be at least 2"):
        allocate_pool(make_layout(), 1)


def test_a_pool_that_cannot_be_mapped_says_how_many_bytes() -> None:
    with pytest.raises(ConfigError, match="bytes cannot be mapped"):
        allocate_pool(make_layout(), 1 << 50)
