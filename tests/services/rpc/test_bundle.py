"""Bundles arrive whole or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ServeError
from services.rpc.bundle import MAX_PIECE_BYTES, BundleBuilder, bundle_digest, iter_pieces
from services.rpc.v1 import baton_pb2 as pb

BUNDLE = {"a": b"x" * (2 * MAX_PIECE_BYTES + 5), "b": b"", "c": b"y" * MAX_PIECE_BYTES}


def build(pieces: list[pb.BundlePiece], digest: str) -> dict[str, bytes]:
    builder = BundleBuilder()
    for piece in pieces:
        builder.add(piece)
    return builder.finish(digest)


def test_pieces_make_the_bundle_again() -> None:
    pieces = list(iter_pieces(BUNDLE))
    assert [(piece.file_name, piece.last) for piece in pieces] == [
        ("a", False),
        ("a", False),
        ("a", True),
        ("b", True),
        ("c", True),
    ]
    assert max(len(piece.data) for piece in pieces) == MAX_PIECE_BYTES
    assert build(pieces, bundle_digest(BUNDLE)) == BUNDLE


def test_a_bundle_that_is_short_or_changed_is_refused() -> None:
    pieces = list(iter_pieces(BUNDLE))
    digest = bundle_digest(BUNDLE)
    with pytest.raises(ServeError, match="'a' was cut short"):
        build(pieces[:1], digest)
    with pytest.raises(ServeError, match="its digest is"):
        build(pieces[:-1], digest)
    with pytest.raises(ServeError, match="after its last one"):
        build([*pieces, pieces[-1]], digest)


@given(
    st.dictionaries(st.text(max_size=3), st.binary(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.binary(max_size=3), max_size=3),
)
def test_different_bundles_have_different_digests(
    first: dict[str, bytes], second: dict[str, bytes]
) -> None:
    assert (bundle_digest(first) == bundle_digest(second)) == (first == second)
