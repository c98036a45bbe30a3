"""A model bundle on the wire: the files a gateway needs (tokenizer, template, generation config),
in pieces.

A bundle is named by its digest, so a gateway fetches each once, whoever has it. A receiver checks
the digest of what arrived against the record's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping

from core.errors import ServeError
from services.rpc.v1 import baton_pb2 as pb

MAX_PIECE_BYTES = 1 << 20

_LENGTHS = struct.Struct("<II")


def bundle_digest(bundle: Mapping[str, bytes]) -> str:
    """The hex SHA-256 of all files, sorted by name, each with the lengths of name and content
    before it.
    """
    digest = hashlib.sha256()
    for name in sorted(bundle):
        encoded, content = name.encode(), bundle[name]
        digest.update(_LENGTHS.pack(len(encoded), len(content)))
        digest.update(encoded)
        digest.update(content)
    return digest.hexdigest()


def iter_pieces(bundle: Mapping[str, bytes]) -> Iterator[pb.BundlePiece]:
    """Every file in pieces of at most MAX_PIECE_BYTES, in order of name; an empty file is one empty
    piece.
    """
    for name in sorted(bundle):
        content = bundle[name]
        starts = range(0, len(content), MAX_PIECE_BYTES) or range(1)
        for start in starts:
            end = start + MAX_PIECE_BYTES
            yield pb.BundlePiece(file_name=name, data=content[start:end], last=end >= len(content))


class BundleBuilder:
    """Puts pieces together again. A piece that does not fit raises ServeError; nothing is guessed."""

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._complete: set[str] = set()

    def add(self, piece: pb.BundlePiece) -> None:
        """Append one piece to its file."""
        name = piece.file_name
        if name in self._complete:
            raise ServeError(f"model bundle: a piece of {name!r} came after its last one")
        self._files.setdefault(name, bytearray()).extend(piece.data)
        if piece.last:
            self._complete.add(name)

    def finish(self, expected_digest: str) -> dict[str, bytes]:
        """The files, when all are complete and have the digest that the record names."""
        missing = self._files.keys() - self._complete
        if missing:
            raise ServeError(f"model bundle: {sorted(missing)[0]!r} was cut short")
        bundle = {name: bytes(content) for name, content in self._files.items()}
        digest = bundle_digest(bundle)
        if digest != expected_digest:
            raise ServeError(
                f"model bundle: its digest is {digest}, the record says {expected_digest}"
            )
        return bundle
