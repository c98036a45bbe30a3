"""Canonical bytes are injective and decodable by the rule the module states."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.canonical import pack_fields

FIELDS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.binary(max_size=12),
        st.integers(min_value=-(2**63), max_value=2**63 - 1),
    ),
    max_size=6,
)


def unpack(data: bytes) -> list[str | int | bytes]:
    """An independent reader of the encoding: that it exists is what makes the encoding injective."""
    values: list[str | int | bytes] = []
    while data:
        tag, length = struct.unpack_from("<cI", data)
        body, data = data[5 : 5 + length], data[5 + length :]
        assert len(body) == length
        if tag == b"i":
            values.append(int.from_bytes(body, "little", signed=True))
        else:
            values.append(body.decode() if tag == b"s" else body)
    return values


@given(FIELDS)
def test_every_list_reads_back_with_its_types(values):
    read = unpack(pack_fields(values))
    assert read == values
    assert [type(value) for value in read] == [type(value) for value in values]


@given(FIELDS, FIELDS)
def test_bytes_are_equal_exactly_when_lists_are(left, right):
    same = [(type(v), v) for v in left] == [(type(v), v) for v in right]
    assert (pack_fields(left) == pack_fields(right)) is same


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["a", ""], ["a"]),
        (["a"], [b"a"]),
        ([1], ["\x01\0\0\0\0\0\0\0"]),
        ([b"ab"], [b"a", b"b"]),
        ([0], ["0"]),
    ],
    ids=["border", "empty", "text-bytes", "int-text", "split", "digit"],
)
def test_neighbours_that_naive_joins_confuse(left, right):
    assert pack_fields(left) != pack_fields(right)


def test_fixed_bytes():
    assert pack_fields(["é", 258, b"\0"]).hex() == (
        "7302000000c3a969080000000201000000000000620100000000"
    )


def test_integers_are_64_bit():
    with pytest.raises(struct.error):
        pack_fields([2**63])
