"""Content hashes of full blocks, chained.

    root    = H(algorithm, schema, KVIdentity, lossy settings, salt)
    hash[0] = H(root, tokens of block 0)
    hash[i] = H(hash[i-1], tokens of block i)

A hash is 16 bytes (the longer digests are cut). The input is canonical bytes, never pickle, so it is equal in
every process: gateways, workers of any incarnation, and an index between them. Tokens are packed as uint32,
little-endian. `sha256` and `xxhash` hash that packing; `sha256_cbor` and `xxhash_cbor` hash canonical CBOR of
`[parent, [tokens]]`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

import cbor2
import xxhash

from core.canonical import pack_fields
from core.errors import ConfigError
from core.kv_identity import KVIdentity

BlockHash = NewType("BlockHash", bytes)
"""16 bytes that name the content of one full block and of everything before it."""

HASH_BYTES = 16
DEFAULT_HASH_BLOCK_SIZE = 16
"""Tokens under one hash: one value a cluster, and worker block sizes are multiples of it."""

_SCHEMA = 1


class HashAlgorithm(StrEnum):
    """How a block is hashed; the names are those of `--prefix-caching-hash-algo`."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


@dataclass(frozen=True, slots=True)
class HashRoot:
    """Where a worker's chains begin. One root a worker (and salt), named in its WorkerInfo.

    algorithm: how blocks are hashed.
    block_size: tokens under one hash.
    seed: 16 bytes over algorithm, identity, lossy settings; the salt is added a request.
    """

    algorithm: HashAlgorithm
    block_size: int
    seed: bytes

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"hash block size: {self.block_size} must be at least 1")
        if len(self.seed) != HASH_BYTES:
            raise ConfigError(f"hash root: {len(self.seed)} bytes of seed must be {HASH_BYTES}")

    @classmethod
    def of(
        cls,
        identity: KVIdentity,
        *,
        algorithm: HashAlgorithm = HashAlgorithm.SHA256,
        block_size: int = DEFAULT_HASH_BLOCK_SIZE,
        lossy_settings: Sequence[str] = (),
    ) -> HashRoot:
        """The root for KV of `identity`; lossy_settings: KV dtype, wire and tier codecs in use, sorted here."""
        head = pack_fields([algorithm.value, _SCHEMA, block_size, *sorted(lossy_settings)])
        body = pack_fields([head, identity.canonical_bytes()])
        return cls(algorithm, block_size, _RAW[algorithm](body))

    def salted(self, salt: str) -> BlockHash:
        """The parent of the first block of a request with this cache salt (empty: none)."""
        return BlockHash(_RAW[self.algorithm](pack_fields([self.seed, salt])))


def hash_block(algorithm: HashAlgorithm, parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of one full block of `token_ids` (each in [0, 2**32)) that follows `parent`."""
    assert len(parent) == HASH_BYTES, (
        f"parent of {len(parent)} bytes: the packing is injective for {HASH_BYTES}"
    )
    if algorithm in (HashAlgorithm.SHA256_CBOR, HashAlgorithm.XXHASH_CBOR):
        body = cbor2.dumps([bytes(parent), list(token_ids)], canonical=True)
    else:
        body = parent + struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(_RAW[algorithm](body))


def iter_chain(
    root: HashRoot, token_ids: Sequence[int], salt: str = "", *, parent: BlockHash | None = None
) -> Iterator[BlockHash]:
    """Hashes of the full blocks of `token_ids`, head first.

    parent: the hash before `token_ids[0]` when these tokens continue a chain; the salted root otherwise.
    """
    current = root.salted(salt) if parent is None else parent
    size = root.block_size
    for start in range(0, len(token_ids) - size + 1, size):
        current = hash_block(root.algorithm, current, token_ids[start : start + size])
        yield current


def hash_chain(root: HashRoot, token_ids: Sequence[int], salt: str = "") -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`, head first."""
    return list(iter_chain(root, token_ids, salt))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:HASH_BYTES]


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


_RAW: dict[HashAlgorithm, Callable[[bytes], bytes]] = {
    HashAlgorithm.SHA256: _sha256,
    HashAlgorithm.SHA256_CBOR: _sha256,
    HashAlgorithm.XXHASH: _xxh3_128,
    HashAlgorithm.XXHASH_CBOR: _xxh3_128,
}
