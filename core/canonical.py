"""Canonical bytes: one injective, process-independent encoding of short field lists.

Each field is a type byte, a length (uint32, little-endian) and its bytes; integers are 8 bytes, signed,
little-endian. Two lists have equal bytes exactly when they are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

Field = str | int | bytes
_HEAD = struct.Struct("<cI")
_INT = struct.Struct("<q")


def pack_fields(values: Iterable[Field]) -> bytes:
    """Encode a list of strings, integers (64 bit, signed) and byte strings."""
    return b"".join(_pack(value) for value in values)


def _pack(value: Field) -> bytes:
    if isinstance(value, bytes):
        tag, body = b"b", value
    elif isinstance(value, str):
        tag, body = b"s", value.encode()
    else:
        tag, body = b"i", _INT.pack(value)
    return _HEAD.pack(tag, len(body)) + body
