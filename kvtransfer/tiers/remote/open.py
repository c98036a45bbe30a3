"""From an address to a remote tier."""

from __future__ import annotations

from dataclasses import dataclass

from core.block_hash import HASH_BYTES, BlockHash
from core.errors import ConfigError
from kvtransfer.tiers.base import BlockKey
from kvtransfer.tiers.policies import DEFAULT_POLICY
from kvtransfer.tiers.remote.store import BlockStore
from kvtransfer.tiers.remote.tier import RemoteTier


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """One worker's remote tier.

    url: where the store is: `redis://`, `rediss://` or `unix://` for a Redis, `lm://` for an LMCache server.
    capacity_bytes: what this worker adds to the store at most.
    policy: which blocks leave, `arc` or `lru`.
    """

    url: str
    capacity_bytes: int
    policy: str = DEFAULT_POLICY


def open_remote_tier(config: RemoteConfig, block_bytes: int, fingerprint: bytes) -> RemoteTier:
    """The tier that was configured. Raises ConfigError; a store that is away is none, and is said now.

    block_bytes: bytes of a block. fingerprint: what the bytes belong to (kvtransfer/tiers/fingerprint.py).
    """
    store = open_store(config.url)
    try:
        tier = RemoteTier(store, config.capacity_bytes, block_bytes, fingerprint, config.policy)
        tier.ask([BlockKey(BlockHash(bytes(HASH_BYTES)))])
    except BaseException:
        store.close()
        raise
    return tier


def open_store(url: str) -> BlockStore:
    """The store at an address; what the address begins with says of which kind. Imports what that kind needs only."""
    scheme = url.partition("://")[0]
    if scheme in ("redis", "rediss", "unix"):
        from kvtransfer.tiers.remote.redis_store import RedisStore

        return RedisStore(url)
    if scheme == "lm":
        from kvtransfer.tiers.remote.lmcache_store import LMCacheStore

        return LMCacheStore(url)
    raise ConfigError(f"--kv-offloading-remote-url: {scheme!r} is no scheme of a store's address")
