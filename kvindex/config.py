"""What can be set about the index: one frozen dataclass, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError

_POSITIVE = (
    "index_shards",
    "command_timeout_ms",
    "retry_interval_ms",
    "max_connections",
    "lease_ms",
    "heartbeat_interval_ms",
    "max_queued_hashes",
    "max_batch_hashes",
    "publish_interval_ms",
    "verify_interval_ms",
    "snapshot_timeout_ms",
)


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Settings of the index, the same in gateways and workers of a cluster where marked (cluster).

    redis_url: where Redis is, `redis://host:port/db`, `rediss://` or `unix://path`; empty: no shared index.
    index_shards: over how many hash tags workers are spread (cluster).
    key_prefix: first word of every key, so that several clusters can share a Redis (cluster).
    command_timeout_ms: how long a call may take, connecting and waiting for a connection included.
    retry_interval_ms: after a failure, how long calls fail at once before one tries Redis again.
    max_connections: most connections this process keeps to Redis.
    lease_ms: how long a worker counts as alive after its last report.
    heartbeat_interval_ms: how often a worker reports its load.
    max_queued_hashes: block hashes a publisher keeps while Redis is away; past it, it drops them for a snapshot.
    max_batch_hashes: block hashes that go to Redis in one call.
    publish_interval_ms: least time between two calls that carry events, so that steps share a call.
    verify_interval_ms: how often an idle publisher asks whether the index is still in step.
    snapshot_timeout_ms: how long a worker's engine may take to list what it holds.
    """

    redis_url: str = ""
    index_shards: int = 1
    key_prefix: str = "baton"
    command_timeout_ms: int = 250
    retry_interval_ms: int = 500
    max_connections: int = 8
    lease_ms: int = 6_000
    heartbeat_interval_ms: int = 500
    max_queued_hashes: int = 131_072
    max_batch_hashes: int = 2_000
    publish_interval_ms: int = 5
    verify_interval_ms: int = 5_000
    snapshot_timeout_ms: int = 10_000

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.lease_ms < 2 * self.heartbeat_interval_ms:
            raise ConfigError(
                f"lease_ms: {self.lease_ms} must be at least twice heartbeat_interval_ms "
                f"({self.heartbeat_interval_ms}), or one late report ends a worker"
            )
        if not self.key_prefix or set(self.key_prefix) & set("{}"):
            raise ConfigError(f"key_prefix: {self.key_prefix!r} must be a word without braces")
