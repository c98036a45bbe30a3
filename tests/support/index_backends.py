"""The back ends of the index, each with a way to let time pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import redis

from kvindex.base import PrefixIndex
from kvindex.config import IndexConfig
from kvindex.memory import MemoryIndex
from kvindex.redis_index import RedisIndex
from services.cluster.valkey import ValkeyServer


@dataclass(frozen=True)
class Backend:
    """An index under test. `advance`: let so many milliseconds pass by the clock that it reads."""

    index: PrefixIndex
    advance: Callable[[int], Awaitable[None]]


def memory_backend() -> Backend:
    now_ms = [1_000_000]

    async def advance(duration_ms: int) -> None:
        now_ms[0] += duration_ms

    return Backend(MemoryIndex(clock_ms=lambda: now_ms[0]), advance)


def redis_backend(server: ValkeyServer, *, index_shards: int = 1) -> Backend:
    async def advance(duration_ms: int) -> None:
        shift_moments(server, duration_ms)

    config = IndexConfig(redis_url=server.url, index_shards=index_shards, command_timeout_ms=60_000)
    return Backend(RedisIndex(config), advance)


def shift_moments(server: ValkeyServer, duration_ms: int) -> None:
    """Let time pass without waiting: every moment that the index has stored moves into the past.

    A server's clock cannot be set, and tests that sleep against it fail on a busy machine.
    """
    with redis.Redis.from_url(server.url) as client:
        for key in list(client.scan_iter()):
            kind = client.type(key)
            if kind == b"zset":
                for member, moment_ms in client.zrange(key, 0, -1, withscores=True):
                    client.zadd(key, {member: moment_ms - duration_ms})
            elif b":worker:" in key:
                for field in (b"load_at", b"seq_at"):
                    if client.hexists(key, field):
                        client.hincrby(key, field, -duration_ms)
            elif b":reservations:" in key:
                for field, record in client.hgetall(key).items():
                    moment_ms, rest = record.split(b" ", 1)
                    client.hset(key, field, b"%d %s" % (int(moment_ms) - duration_ms, rest))
            client.pexpireat(key, client.pexpiretime(key) - duration_ms)
