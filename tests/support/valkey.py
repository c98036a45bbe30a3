"""A real Redis-compatible server for tests: one a test session, flushed between tests; and raw access to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.asyncio import Redis

from services.cluster.valkey import ValkeyServer, start_valkey


@contextmanager
def running_valkey(
    *, port: int | None = None, options: tuple[str, ...] = ()
) -> Iterator[ValkeyServer]:
    """A server that is gone when the block ends, also when a test left it paused or killed."""
    server = start_valkey(port=port, options=options)
    try:
        yield server
    finally:
        server.stop()


async def command(server: ValkeyServer, *words: Any) -> Any:
    """Send one command on a connection of its own, past the code under test."""
    client = Redis.from_url(server.url)
    try:
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]
    finally:
        await client.aclose()


def flush(server: ValkeyServer) -> None:
    """Empty the server, scripts included, so that each test starts as on a new one."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.script_flush()
