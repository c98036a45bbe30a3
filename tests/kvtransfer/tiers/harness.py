"""Small tiers of every kind, and blocks whose bytes follow from their key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import redis
import xxhash

from core.block_hash import BlockHash
from kvtransfer.tiers.base import BlockKey, Placement, StorePlan, Tier
from kvtransfer.tiers.disk import DiskConfig, DiskTier
from kvtransfer.tiers.disk_files import HEADER_BYTES, RECORD_BYTES
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.remote.lmcache_store import LMCacheStore
from kvtransfer.tiers.remote.redis_store import PREFIX, RedisStore
from kvtransfer.tiers.remote.store import BlockStore, Fetch
from kvtransfer.tiers.remote.tier import RemoteTier
from kvtransfer.tiers.remote.value import HEADER_BYTES as VALUE_HEADER_BYTES
from kvtransfer.tiers.remote.value import name_of
from services.cluster.valkey import ValkeyServer, start_valkey
from tests.support.block_stores import new_prefix, running_lmcache
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.support.valkey import flush

KINDS = ("host", "disk", "remote", "redis", "lmcache")
"""`remote` is the remote tier over a store in memory, the last two the same over real servers.

`lmcache` needs a package, and is skipped where it is not installed.
"""

BLOCK_BYTES = 1000  # no multiple of anything
FINGERPRINT = b"tiers under test"


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(BlockHash(number.to_bytes(16, "little")), group)


def chain(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def content(block_key: BlockKey, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The bytes that belong to a key."""
    name = block_key.hash + bytes([block_key.group])
    return (xxhash.xxh3_128_digest(name) * (block_bytes // 16 + 1))[:block_bytes]


def capacity_bytes(kind: str, num_slots: int, block_bytes: int = BLOCK_BYTES) -> int:
    """What so many blocks take in a tier of this kind, to the byte."""
    if kind == "host":
        header = -(-(64 + 8 * num_slots) // 4096) * 4096
        return header + num_slots * block_bytes
    if kind == "disk":
        return HEADER_BYTES + num_slots * (block_bytes + RECORD_BYTES)
    return num_slots * (VALUE_HEADER_BYTES + block_bytes)


def make_tier(
    kind: str,
    folder: Path,
    num_slots: int = 4,
    policy: str = "lru",
    *,
    block_bytes: int = BLOCK_BYTES,
    min_frequency: int = 0,
    fingerprint: bytes = FINGERPRINT,
) -> Tier:
    num_bytes = capacity_bytes(kind, num_slots, block_bytes)
    if kind == "host":
        return HostTier(num_bytes, block_bytes, policy)
    if kind == "disk":
        config = DiskConfig(folder, num_bytes, policy, min_frequency=min_frequency)
        return DiskTier(config, block_bytes, fingerprint)
    return RemoteTier(make_store(kind), num_bytes, block_bytes, fingerprint, policy)


def make_store(kind: str) -> BlockStore:
    """An empty store."""
    if kind == "remote":
        return MemoryStore(MemoryServer())
    if kind == "lmcache":
        return LMCacheStore(running_lmcache().url, prefix=new_prefix())
    flush(valkey())
    return RedisStore(valkey().url)


_servers: list[ValkeyServer] = []


def valkey() -> ValkeyServer:
    """The session's server; started when it is first asked for."""
    if not _servers:
        _servers.append(start_valkey())
    return _servers[0]


def stop_servers() -> None:
    while _servers:
        _servers.pop().stop()


def damage(tier: Tier, placement: Placement, folder: Path, byte: int = 7) -> None:
    """Turn a bit of a block where the tier has it."""
    if isinstance(tier, HostTier):
        tier.slot_buffer(placement.slot)[byte] ^= 4
    elif isinstance(tier, DiskTier):
        with (folder / "blocks").open("r+b") as file:
            file.seek(placement.slot * tier.block_bytes + byte)
            flipped = file.read(1)[0] ^ 4
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([flipped]))
    else:
        assert isinstance(tier, RemoteTier)
        name = name_of(FINGERPRINT, placement.key)
        value = bytearray(VALUE_HEADER_BYTES + tier.block_bytes)
        if tier.store.get_into(name, [memoryview(value)]) is Fetch.WHOLE:
            value[VALUE_HEADER_BYTES + byte] ^= 4
            tier.store.delete([name])
            tier.store.put(name, [memoryview(value)])


def used_bytes(tier: Tier, folder: Path) -> int:
    """What the tier's blocks take where it has them, with all that belongs to them."""
    if isinstance(tier, HostTier):
        return len(tier._memory.mapping)
    if isinstance(tier, DiskTier):
        return sum(path.stat().st_size for path in folder.iterdir())
    assert isinstance(tier, RemoteTier)
    if isinstance(tier.store, MemoryStore):
        return tier.store.server.used_bytes()
    if isinstance(tier.store, LMCacheStore):  # it cannot be listed
        names = [name_of(FINGERPRINT, key(number)) for number in range(100)]
        num_blocks = sum(tier.store.count_leading([name]) for name in names)
        return num_blocks * (VALUE_HEADER_BYTES + tier.block_bytes)
    with redis.Redis.from_url(valkey().url) as client:
        return sum(client.strlen(name) for name in client.keys(f"{PREFIX}*"))


def make_disk(folder: Path, num_slots: int = 4, **options: object) -> DiskTier:
    tier = make_tier("disk", folder, num_slots, **options)  # type: ignore[arg-type]
    assert isinstance(tier, DiskTier)
    return tier


def write_all(tier: Tier, placements: Sequence[Placement]) -> None:
    for placement in placements:
        tier.write(placement, memoryview(content(placement.key, tier.block_bytes)))


def store(tier: Tier, *numbers: int) -> StorePlan:
    """Store a chain, bytes and all."""
    plan = tier.prepare_store(chain(*numbers))
    assert plan is not None
    write_all(tier, plan.placements)
    tier.complete_store(plan.placements, ok=True)
    return plan


def load(tier: Tier, keys: Sequence[BlockKey]) -> list[bytes | None]:
    """What a reader of these keys gets; None for a block that is not what was written."""
    placements = tier.prepare_load(keys)
    assert placements is not None
    got: list[bytes | None] = []
    damaged = []
    for placement in placements:
        buffer = bytearray(tier.block_bytes)
        if tier.read(placement, memoryview(buffer)):
            got.append(bytes(buffer))
        else:
            got.append(None)
            damaged.append(placement)
    tier.complete_load(placements, damaged)
    return got


def held(tier: Tier, numbers: Sequence[int]) -> list[int]:
    """Those that are found."""
    return [number for number in numbers if tier.lookup([key(number)])]


def check_all(tier: Tier, numbers: Sequence[int]) -> int:
    """Read whatever of these is found, and hold it to what belongs there; how many were right."""
    found = held(tier, numbers)
    for number in found:
        assert load(tier, [key(number)]) == [content(key(number), tier.block_bytes)]
    return len(found)


class Buffers:
    """Targets of a load that take every block until they are closed, and tell which the mover is inside."""

    def __init__(self, num_blocks: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.buffers = [bytearray(block_bytes) for _ in range(num_blocks)]
        self.is_closed = False
        self.inside: set[int] = set()

    def enter(self, index: int) -> memoryview | None:
        if self.is_closed:
            return None
        self.inside.add(index)
        return memoryview(self.buffers[index])

    def leave(self, index: int) -> None:
        self.inside.remove(index)
