"""A real Redis-compatible server for tests: one a test session, flushed between tests; and raw access to it."""

from __future__ import annotations

import socket
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


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class HeldPort:
    """A TCP port of 127.0.0.1 that refuses connections until a server is to take it.

    One that is merely free can become the port of a client: one that tries to reach it again and again then meets
    itself, and the server finds it taken.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Let a server have it."""
        self._socket.close()


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
