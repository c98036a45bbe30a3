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
    RankShare,
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


@given(
    dtype=st.sampled_from(sorted(KV_DTYPES)), head_dim=st.integers(1, 9), size=st.integers(1, 64)
)
def test_parts_tile_the_slab_and_end_with_the_scales(dtype, head_dim, size):
    slot = SlotFormat.of(dtype, head_dim)
    parts = slot.slab_parts(size)
    end_bytes = 0
    for part in parts:
        assert part.offset_bytes == end_bytes
        end_bytes += part.slot_bytes * size
    assert end_bytes == slot.slot_bytes * size
    if slot.has_scales:
        assert parts[2].offset_bytes == slot.scales_offset_bytes(size)


# ---------------------------------------------------------------- ranks


def shares_of(layout, group=0):
    return [layout.rank_share(group, rank) for rank in range(layout.num_ranks)]


@pytest.mark.parametrize(
    ("num_heads", "tensor_ranks", "heads"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 2, [(0, 1), (1, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_tensor_ranks_share_heads_or_hold_the_same(num_heads, tensor_ranks, heads):
    layout = make_layout(make_group(num_kv_heads=num_heads), tensor_ranks=tensor_ranks)
    assert [share.heads for share in shares_of(layout)] == [range(*pair) for pair in heads]
    assert all(share.layers == range(3) for share in shares_of(layout))
    assert layout.head_copies(0) == max(1, tensor_ranks // num_heads)


@pytest.mark.parametrize(
    ("num_layers", "stages"),
    [(6, [3, 3]), (7, [2, 3, 2]), (8, [3, 3, 2]), (61, [15, 15, 16, 15]), (2, [0, 1, 1, 0])],
)
def test_stages_share_layers_as_vllm_divides_them(num_layers, stages):
    layout = make_layout(make_group(num_layers=num_layers), pipeline_ranks=len(stages))
    ends = [sum(stages[: index + 1]) for index in range(len(stages))]
    expected = [range(end - count, end) for end, count in zip(ends, stages, strict=True)]
    assert [share.layers for share in shares_of(layout)] == expected


def test_a_stage_holds_the_layers_of_its_stretch_of_the_model_in_every_group():
    even = replace(make_group(), layers=(0, 2, 4, 6))
    odd = replace(make_group(), layers=(1, 3, 5))
    last = replace(make_group(), layers=(7,))
    layout = make_layout(even, odd, last, tensor_ranks=2, pipeline_ranks=2)
    first_rank, last_rank = layout.rank_groups(1), layout.rank_groups(2)
    assert first_rank == (
        replace(even, layers=(0, 2), num_kv_heads=1),
        replace(odd, layers=(1, 3), num_kv_heads=1),
        None,
    )
    assert [group.layers for group in last_rank] == [(4, 6), (5,), (7,)]
    assert layout.rank_share(0, 2) == RankShare(range(2, 4), range(1))
    assert layout.rank_block_bytes(1) == 2 * make_group().slab_bytes(16)
    assert layout.rank_share(0, 3).slab_index(3, 1) == 1


def test_one_rank_holds_everything():
    layout = make_layout(make_group(), replace(make_group(), layers=(3, 4)))
    assert layout.rank_groups(0) == layout.groups
    assert layout.rank_block_bytes(0) == layout.block_bytes


def test_a_stage_without_layers_has_empty_blocks():
    layout = make_layout(make_group(num_layers=1), pipeline_ranks=3)
    assert [layout.rank_block_bytes(rank) for rank in range(3)].count(0) == 2


@given(
    copies=st.sampled_from([(1, 4), (2, 2), (4, 1), (4, 4)]),
    pipeline_ranks=st.integers(1, 5),
    layers=st.sets(st.integers(0, 9), min_size=1),
)
def test_every_layer_of_every_head_is_on_as_many_ranks_as_there_are_copies(
    copies, pipeline_ranks, layers
):
    num_heads, tensor_ranks = copies
    group = replace(make_group(num_kv_heads=num_heads), layers=tuple(sorted(layers)))
    layout = make_layout(group, tensor_ranks=tensor_ranks, pipeline_ranks=pipeline_ranks)
    held = [
        (layer, head)
        for share in shares_of(layout)
        for layer in share.layers
        for head in share.heads
    ]
    copies = layout.head_copies(0)
    every = [(layer, head) for layer in range(len(layers)) for head in range(num_heads)]
    assert sorted(held) == sorted(every * copies)


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
        (
            lambda: make_layout(tensor_ranks=64, pipeline_ranks=32),
            r"tensor_ranks \* pipeline_ranks: 2048 must be at most 1024",
        ),
        (lambda: make_layout(wire_dtype="int4"), "KV dtype: 'int4' is unknown; known: bfloat16"),
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
    "other",
    [
        make_layout(block_size=24),
        make_layout(tensor_ranks=2),
        make_layout(tensor_ranks=4),
        make_layout(pipeline_ranks=5),
        make_layout(block_size=48, tensor_ranks=2, pipeline_ranks=2),
    ],
)
def test_a_plan_takes_any_block_size_and_ranks(other):
    assert can_convert(make_layout(), other)
    assert can_convert(other, make_layout())


@pytest.mark.parametrize(
    ("source", "destination"), [(a, b) for a in KV_DTYPES for b in KV_DTYPES if a != b]
)
def test_another_kv_dtype_is_an_obstacle_unless_the_receiver_names_one_for_the_wire(
    source, destination
):
    given, kept = (make_layout(make_group(dtype=dtype)) for dtype in (source, destination))
    assert conversion_obstacles(given, kept) == [
        f"group 0 KV dtype (wire dtype: raw): source {source}, destination {destination}"
    ]
    for wire_dtype in (source, destination, "float16"):
        assert can_convert(given, replace(kept, wire_dtype=wire_dtype))
    assert not can_convert(replace(given, wire_dtype=destination), kept)  # the sender has no say


def test_the_wire_keeps_slots_as_the_receiver_wants_them():
    raw = make_layout(make_group(dtype="bfloat16", head_dim=8))
    assert raw.wire_slot(0) == raw.groups[0].slot
    assert replace(raw, wire_dtype="fp8_per_token_head").wire_slot(0) == SlotFormat.of(
        "fp8_per_token_head", 8
    )


@pytest.mark.parametrize(
    ("other", "obstacle"),
    [
        (make_layout(make_group(num_layers=2)), "layers: source (0, 1, 2), destination (0, 1)"),
        (make_layout(make_group(num_kv_heads=4)), "num_kv_heads: source 2, destination 4"),
        (make_layout(make_group(head_dim=4)), "head_dim: source 8, destination 4"),
        (
            make_layout(replace(make_group(), kind=GroupKind.DRAFT)),
            "kind: source full_attention, destination draft",
        ),
    ],
)
@pytest.mark.parametrize("wire_dtype", [None, "float32"])
def test_no_plan_changes_what_the_model_is(other, obstacle, wire_dtype):
    other = replace(other, wire_dtype=wire_dtype)
    assert conversion_obstacles(make_layout(), other) == [f"group 0 {obstacle}"]


def test_another_number_of_groups_is_one_obstacle():
    other = make_layout(make_group(), make_group())
    (found,) = conversion_obstacles(make_layout(), other)
    assert found == "number of groups: source 1, destination 2"


def test_heads_that_do_not_divide_over_ranks_are_an_obstacle_on_either_side():
    layout = make_layout(make_group(num_kv_heads=4), tensor_ranks=3)
    assert conversion_obstacles(layout, layout) == [
        "group 0: source's 3 tensor ranks and 4 KV heads do not divide",
        "group 0: destination's 3 tensor ranks and 4 KV heads do not divide",
    ]


def test_all_obstacles_are_listed():
    other = make_layout(make_group(head_dim=4, dtype="bfloat16"))
    assert len(conversion_obstacles(make_layout(), other)) == 2
