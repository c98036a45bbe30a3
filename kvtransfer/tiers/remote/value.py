"""What a block is in a shared store: its name, and a value that says what it is.

    name  = FINGERPRINT-GROUP:HASH, all hexadecimal
    value = | magic 8 | version u32 | header_bytes u32 | block_bytes u64 | digest of name 16 | of block 16 | block |

Little-endian; digests are XXH3-128. The fingerprint covers model, layout and rank, so that other KV has other names.
A value is believed where all of its header is as it must be: a value under a wrong name, of another version, or with
one bit turned is none.
"""

from __future__ import annotations

import struct

import xxhash

from kvtransfer.tiers.base import BlockKey

MAGIC = b"BATONKVR"
VERSION = 1
_HEADER = struct.Struct("<8sIIQ16s16s")
HEADER_BYTES = _HEADER.size


def name_of(fingerprint: bytes, key: BlockKey) -> str:
    """The name of a block, equal in every worker that holds KV in the same way."""
    return f"{fingerprint.hex()}-{key.group:x}:{key.hash.hex()}"


def header_of(name: str, block: memoryview) -> bytes:
    """What stands before a block in its value."""
    name_digest = xxhash.xxh3_128_digest(name.encode())
    block_digest = xxhash.xxh3_128_digest(block)
    return _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, block.nbytes, name_digest, block_digest)
