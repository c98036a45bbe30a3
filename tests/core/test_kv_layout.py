"""Layout arithmetic against a drawn-out block, and what may be converted into what."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from core.kv_layout import (
    KV_DTYPE_ALIASES,
    KV_DTYPES,
    GroupKind,
    KVGroup,
    KVLayout,
    Run,
    SlotFormat,
    can_convert,
    conversion_obstacles,
)


def make_group(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", first_layer=0):
    layers = tuple(range(first_layer, first_layer + num_layers))
    slot = SlotFormat.of(dtype, head_dim)
    return KVGroup(GroupKind.FULL_ATTENTION, layers, num_kv_heads, slot)


def make_layout(*groups, block_size=16, **changes):
    return KVLayout(block_size, groups or (make_group(),), **changes)


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("dtype", "element"),
    [("float32", 4), ("bfloat16", 2), ("float16", 2), ("fp8_e4m3", 1), ("fp8_e5m2", 1)],
)
def test_bytes_of_slot_slab_layer_block(dtype, element):
    group = make_group(dtype=dtype)
    layout = make_layout(group)
    assert group.slot.slot_bytes == 2 * 8 * element  # K and V of one head
    assert group.slab_bytes(16) == 16 * 2 * 8 * element
    assert group.layer_bytes(16) == 2 * 16 * 2 * 8 * element
    assert layout.block_bytes == group.used_bytes(16) == 3 * 2 * 16 * 2 * 8 * element


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_a_scaled_slot_holds_two_scales_beside_its_elements(dtype):
    group = make_group(dtype=dtype)
    assert group.slot.name == "token_head_scaled"
    assert group.slot.slot_bytes == 2 * 8 + 2 * 4
    assert group.slab_bytes(16) == 16 * (2 * 8 + 2 * 4)
    assert group.slot.scales_offset_bytes(16) == 2 * 16 * 8
    assert group.slot.alignment_bytes == 4
    assert make_layout(group).block_bytes == 3 * 2 * group.slab_bytes(16)


def test_every_kv_dtype_has_one_format():
    for name, dtype in KV_DTYPES.items():
        slot = SlotFormat.of(name, 8)
        assert (slot.name, slot.element_bytes) == dtype
        assert slot.alignment_bytes % slot.element_bytes == 0
    assert set(KV_DTYPE_ALIASES.values()) <= set(KV_DTYPES)
    assert not set(KV_DTYPE_ALIASES) & set(KV_DTYPES)


def test_demo_model_block():
    layout = make_layout(make_group(num_layers=30, num_kv_heads=3, head_dim=64))
    assert layout.block_bytes == 30 * 3 * 64 * 2 * 4 * 16 == 737_280


def test_the_widest_group_sets_block_bytes_for_all():
    wide, narrow = make_group(num_layers=4), make_group(num_layers=1, first_layer=4)
    layout = make_layout(narrow, wide)
    assert layout.block_bytes == wide.used_bytes(16) == 4 * narrow.used_bytes(16)


@given(
    num_layers=st.integers(1, 12),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([1, 8, 64, 128]),
    block_size=st.sampled_from([1, 16, 32]),
)
def test_single_layer_runs_tile_the_block(num_layers, num_kv_heads, head_dim, block_size):
    layout = make_layout(make_group(num_layers, num_kv_heads, head_dim), block_size=block_size)
    runs = [layout.layer_run(0, layer, 1) for layer in range(num_layers)]
    end_bytes = 0
    for run in runs:
        assert run.offset_bytes == end_bytes
        end_bytes += run.num_bytes
    assert end_bytes == layout.block_bytes
    assert layout.layer_run(0, 0, num_layers) == Run(0, layout.block_bytes)


@given(st.data())
def test_a_layer_range_is_one_run_of_its_layers(data):
    layout = make_layout(make_group(num_layers=10))
    first = data.draw(st.integers(0, 9))
    count = data.draw(st.integers(1, 10 - first))
    run = layout.layer_run(0, first, count)
    assert run.offset_bytes == layout.layer_run(0, first, 1).offset_bytes
    assert run.num_bytes == sum(layout.layer_run(0, first + i, 1).num_bytes for i in range(count))


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, 4), (3, 1), (2, 2), (1, -1)])
def test_runs_outside_the_group_are_our_mistake(first, count):
    with pytest.raises(AssertionError, match="not in group 0"):
        make_layout().layer_run(0, first, count)


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "slots"),
    [
        (0, 0, [0, 0, 0]),
        (1, 1, [1, 0, 0]),
        (15, 1, [15, 0, 0]),
        (16, 1, [16, 0, 0]),
        (17, 2, [16, 1, 0]),
        (48, 3, [16, 16, 16]),
    ],
)
def test_blocks_and_valid_slots(num_tokens, blocks, slots):
    layout = make_layout()
    assert layout.num_blocks(num_tokens) == blocks
    assert [layout.valid_slots(position, num_tokens) for position in range(3)] == slots


@given(num_tokens=st.integers(0, 5000), block_size=st.sampled_from([16, 32, 128]))
def test_valid_slots_sum_to_the_tokens(num_tokens, block_size):
    layout = make_layout(block_size=block_size)
    positions = range(layout.num_blocks(num_tokens))
    slots = [layout.valid_slots(position, num_tokens) for position in positions]
    assert sum(slots) == num_tokens
    assert all(slots)  # no block without a token


def test_num_ranks():
    assert make_layout(tensor_ranks=4, pipeline_ranks=2).num_ranks == 8


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: SlotFormat("int3", "float32", 8),
            "slot format: 'int3' is unknown; known: plain, token_head_scaled",
        ),
        (
            lambda: SlotFormat("plain", "int8_per_token_head", 8),
            "slot format: 'plain' does not hold int8_per_token_head; token_head_scaled does",
        ),
        (
            lambda: SlotFormat("token_head_scaled", "fp8_e4m3", 8),
            "slot format: 'token_head_scaled' does not hold fp8_e4m3; plain does",
        ),
        (lambda: SlotFormat.of("fp8", 8), "KV dtype: 'fp8' is unknown"),
        (
            lambda: SlotFormat("plain", "float8", 8),
            "KV dtype: 'float8' is unknown; known: bfloat16",
        ),
        (lambda: SlotFormat("plain", "float32", 0), "head_dim: 0 must be at least 1"),
        (lambda: make_group(num_layers=0), "layers is empty"),
        (lambda: replace(make_group(), layers=(1, 0)), r"layers \(1, 0\) must be ascending"),
        (lambda: replace(make_group(), layers=(1, 1)), r"layers \(1, 1\) must be ascending"),
        (lambda: make_group(num_kv_heads=0), "num_kv_heads: 0 must be at least 1"),
        (lambda: replace(make_group(), window=128), "window: 128 does not fit"),
        (lambda: replace(make_group(), kind=GroupKind.SLIDING_WINDOW), "window: None does not fit"),
        (
            lambda: replace(make_group(), kind=GroupKind.SLIDING_WINDOW, window=0),
            "window: 0 must be at least 1",
        ),
        (lambda: make_layout(block_size=0), "block_size: 0 must be at least 1"),
        (lambda: KVLayout(16, ()), "groups is empty"),
        (lambda: make_layout(order="head_layer_slab"), "KV order: 'head_layer_slab' is unknown"),
        (lambda: make_layout(tensor_ranks=0), "tensor_ranks: 0 must be at least 1"),
        (lambda: make_layout(pipeline_ranks=0), "pipeline_ranks: 0 must be at least 1"),
    ],
)
def test_a_bad_layout_names_field_value_and_limit(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


# ---------------------------------------------------------------- conversion


def test_equal_layouts_convert():
    assert can_convert(make_layout(), make_layout())
    assert conversion_obstacles(make_layout(), make_layout()) == []


@pytest.mark.parametrize(
    ("other", "obstacle"),
    [
        (make_layout(block_size=32), "block size: source 16, destination 32"),
        (make_layout(tensor_ranks=2), "tensor ranks: source 1, destination 2"),
        (make_layout(pipeline_ranks=2), "pipeline ranks: source 1, destination 2"),
        (make_layout(make_group(dtype="bfloat16")), "groups: source"),
        (make_layout(make_group(dtype="int8_per_token_head")), "groups: source"),
        (make_layout(make_group(num_layers=4)), "groups: source"),
        (make_layout(make_group(first_layer=1)), "groups: source"),
    ],
)
def test_each_difference_is_an_obstacle_that_names_both_values(other, obstacle):
    assert not can_convert(make_layout(), other)
    (found,) = conversion_obstacles(make_layout(), other)
    assert found.startswith(obstacle)
    assert "destination" in found


def test_all_obstacles_are_listed():
    other = make_layout(block_size=32, tensor_ranks=2)
    assert len(conversion_obstacles(make_layout(), other)) == 2
