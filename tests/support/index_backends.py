"""The back ends of the index, each with a way to let time pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

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
        await asyncio.sleep((duration_ms + 2) / 1000)

    config = IndexConfig(redis_url=server.url, index_shards=index_shards, command_timeout_ms=5_000)
    return Backend(RedisIndex(config), advance)
