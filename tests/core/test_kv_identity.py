"""KVIdentity: equal bytes for equal identities, and every difference is named with both values."""

from dataclasses import fields, replace

import pytest

from core.kv_identity import GroupShape, KVIdentity, identity_differences

SHAPE = GroupShape("full_attention", num_layers=30, num_kv_heads=3, head_dim=64)
IDENTITY = KVIdentity("ab" * 32, "float32", "float32", "", (SHAPE,))

CHANGES = {
    "model_digest": "cd" * 32,
    "weight_format": "gguf",
    "activation_dtype": "bfloat16",
    "adapter_digest": "ef" * 32,
    "group_shapes": (SHAPE, SHAPE),
}
SHAPE_CHANGES = {
    "kind": "sliding_window",
    "num_layers": 31,
    "num_kv_heads": 4,
    "head_dim": 128,
    "window": 4096,
}


def test_the_tables_cover_every_field():
    assert set(CHANGES) == {field.name for field in fields(KVIdentity)}
    assert set(SHAPE_CHANGES) == {field.name for field in fields(GroupShape)}


def test_equal_identities_have_equal_bytes_and_no_difference():
    twin = replace(IDENTITY, group_shapes=(replace(SHAPE),))
    assert twin.canonical_bytes() == IDENTITY.canonical_bytes()
    assert identity_differences(IDENTITY, twin) == []


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_changes_the_bytes_and_is_named(name):
    other = replace(IDENTITY, **{name: CHANGES[name]})
    assert other.canonical_bytes() != IDENTITY.canonical_bytes()
    (difference,) = identity_differences(IDENTITY, other)
    assert difference == f"{name}: ours {getattr(IDENTITY, name)!r}, theirs {CHANGES[name]!r}"


@pytest.mark.parametrize("name", SHAPE_CHANGES)
def test_each_field_of_a_group_shape_changes_the_bytes(name):
    shape = replace(SHAPE, **{name: SHAPE_CHANGES[name]})
    other = replace(IDENTITY, group_shapes=(shape,))
    assert other.canonical_bytes() != IDENTITY.canonical_bytes()
    assert [line.split(":")[0] for line in identity_differences(IDENTITY, other)] == [
        "group_shapes"
    ]


def test_values_do_not_slide_between_fields():
    left = replace(IDENTITY, weight_format="float32x", activation_dtype="y")
    right = replace(IDENTITY, weight_format="float32", activation_dtype="xy")
    assert left.canonical_bytes() != right.canonical_bytes()


def test_several_differences_are_all_named():
    other = replace(IDENTITY, weight_format="gguf", activation_dtype="float16")
    assert [line.split(":")[0] for line in identity_differences(IDENTITY, other)] == [
        "weight_format",
        "activation_dtype",
    ]
