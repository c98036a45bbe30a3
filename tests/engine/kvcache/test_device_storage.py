"""A pool with a mirror: only what is named crosses, byte for byte, and what the sender may read is there.

The device is the host here, as a second memory; with a card that is pretended, what must be waited for is.
"""

from __future__ import annotations

import tests.support.triton_device  # isort: skip  # noqa: F401  first: it chooses the interpreter

import pytest
import torch

from core.errors import ConfigError
from core.ids import BlockId
from core.kv_layout import KV_DTYPES, GroupKind, KVGroup, KVLayout, SlotFormat
from engine.devices import HOST
from engine.kvcache.device_storage import DeviceStorage, allocate_device_pool
from engine.kvcache.storage import allocate_pool
from tests.support.triton_device import IS_INTERPRETED

NUM_BLOCKS = 6


def make_layout(dtype: str = "float32") -> KVLayout:
    """Two groups of unlike formats, the second one padded."""
    full = KVGroup(GroupKind.FULL_ATTENTION, (0, 2, 4), 2, SlotFormat.of(dtype, 8))
    window = KVGroup(
        GroupKind.SLIDING_WINDOW, (1, 3), 2, SlotFormat.of("int8_per_token_head", 8), 7
    )
    return KVLayout(16, (full, window))


def make_pool(layout: KVLayout, device: torch.device = HOST) -> DeviceStorage:
    """A pool whose two memories hold different random bytes."""
    storage = allocate_device_pool(layout, NUM_BLOCKS, device)
    generator = torch.Generator().manual_seed(5)
    for memory in (storage.tensor, storage.mirror.tensor):
        memory.copy_(torch.randint(256, memory.shape, dtype=torch.uint8, generator=generator))
    return storage


def changed_bytes(before: torch.Tensor, after: torch.Tensor) -> set[tuple[int, int]]:
    return {(block, place) for block, place in (before != after).nonzero().tolist()}


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(("first_layer", "num_layers"), [(0, 1), (1, 1), (0, 2)])
@pytest.mark.parametrize("way", ["in", "out"])
def test_only_the_named_layers_of_the_named_blocks_cross(
    way: str, group: int, first_layer: int, num_layers: int
) -> None:
    layout = make_layout()
    storage = make_pool(layout)
    source, target = storage.mirror.tensor, storage.tensor
    if way == "out":
        source, target = target, source
    before, kept = target.clone(), source.clone()
    blocks = [BlockId(4), BlockId(2)]
    if way == "in":
        for block in blocks:
            storage.bring_in(group, block, first_layer, num_layers)
    else:
        storage.bring_out(group, blocks, first_layer, num_layers)
    run = layout.layer_run(group, first_layer, num_layers)
    end = run.offset_bytes + run.num_bytes
    expected = before.clone()
    expected[blocks, run.offset_bytes : end] = kept[blocks, run.offset_bytes : end]
    assert torch.equal(target, expected)
    assert torch.equal(source, kept)
    assert 0 < len(changed_bytes(before, target)) <= 2 * run.num_bytes


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_views_show_the_device_as_a_pool_on_the_host_is_shown(dtype: str) -> None:
    layout = make_layout(dtype)
    storage = make_pool(layout)
    plain = allocate_pool(layout, NUM_BLOCKS)
    plain.tensor.copy_(storage.tensor)
    for group in (0, 1):
        for own, other in zip(storage.layer_views(group), plain.layer_views(group), strict=True):
            assert own.values.stride() == other.values.stride()
            assert torch.equal(own.values.view(torch.uint8), other.values.view(torch.uint8))
            assert (own.scales is None) == (other.scales is None)
        views = storage.layer_views(group)
        assert views[0].values.untyped_storage().data_ptr() == storage.tensor.data_ptr()


def test_movers_see_the_mirror() -> None:
    storage = make_pool(make_layout())
    block_bytes = storage.layout.block_bytes
    storage.buffer[3 * block_bytes] = 77
    assert storage.mirror.tensor[3, 0] == 77
    before = storage.tensor[3, 0].item()
    storage.bring_in(0, BlockId(3), 0, 1)
    assert (before, storage.tensor[3, 0].item()) == (before, 77)
    storage.close()
    storage.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = storage.buffer


def test_memory_begins_at_zero_and_what_is_too_large_is_said_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = make_layout()
    assert not allocate_device_pool(layout, NUM_BLOCKS, HOST).tensor.any()

    def no_room(*_: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("engine.kvcache.device_storage.lock_pages", no_room)
    wanted_bytes = NUM_BLOCKS * layout.block_bytes
    with pytest.raises(
        ConfigError, match=f"{wanted_bytes} bytes on cpu .*-memory-bytes .out of mem"
    ):
        allocate_device_pool(layout, NUM_BLOCKS, HOST)


@pytest.mark.skipif(not IS_INTERPRETED, reason="the card is pretended")
def test_beside_a_card_the_sender_finds_what_was_brought_out_and_the_mirror_is_page_locked() -> (
    None
):
    pytest.importorskip("triton", reason="needs the extra `triton`, which exists for Linux only")
    from tests.support.pretend_card import CARD, CardTensor, pretend_card

    layout = make_layout()
    with pretend_card() as card:
        storage = make_pool(layout, CARD)
        assert isinstance(storage.tensor, CardTensor)
        assert not isinstance(storage.mirror.tensor, CardTensor)
        num_bytes = NUM_BLOCKS * layout.block_bytes
        assert card.page_locked == {storage.mirror.tensor.data_ptr(): num_bytes}
        storage.bring_in(0, BlockId(1), 0, 3)
        assert card.num_waits == 0, "who reads it is queued behind it"
        storage.tensor[2].fill_(9)
        storage.bring_out(0, [BlockId(2)], 1, 2)
        assert (card.num_waits, card.num_queued) == (1, 0)
        run = layout.layer_run(0, 1, 2)
        start = 2 * layout.block_bytes + run.offset_bytes
        assert storage.buffer[start : start + run.num_bytes] == bytes([9]) * run.num_bytes
        storage.close()
        assert card.page_locked == {}
