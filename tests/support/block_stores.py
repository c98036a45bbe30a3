"""The shared stores that the contract runs over, each with a server of its own that a test may end and start again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kvtransfer.tiers.remote.lmcache_store import LMCacheStore
from kvtransfer.tiers.remote.redis_store import RedisStore
from kvtransfer.tiers.remote.store import BlockStore
from tests.support.lmcache_server import IS_INSTALLED, LMCacheServer
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.support.valkey import running_valkey

STORES = ("memory", "redis", "redis over tcp", "lmcache")
"""`lmcache` needs a package, and is skipped where it is not installed."""


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class StoreServer:
    """A server under test.

    connect: one worker's store on it, with `clock` for its pauses.
    kill, restart: end it as a crash would; bring it back, empty, at the same address.
    """

    connect: Callable[[], BlockStore]
    kill: Callable[[], None]
    restart: Callable[[], None]
    clock: Clock


@contextmanager
def store_server(kind: str) -> Iterator[StoreServer]:
    clock = Clock()
    if kind == "memory":
        memory = MemoryServer()
        yield StoreServer(lambda: MemoryStore(memory, clock), memory.kill, memory.restart, clock)
        return
    if kind == "lmcache":
        yield _on_lmcache(clock)
        return
    with running_valkey(port=None if kind == "redis" else 0) as valkey:
        url = valkey.url
        yield StoreServer(
            lambda: RedisStore(url, clock_s=clock), valkey.kill, valkey.restart, clock
        )


_lmcache: list[LMCacheServer] = []
_numbers = itertools.count()


def running_lmcache() -> LMCacheServer:
    """One server a session, since it takes seconds to start. Skips the test where there is none."""
    if not IS_INSTALLED:
        pytest.skip("needs the extra `lmcache`")
    if not _lmcache:
        _lmcache.append(LMCacheServer())
    if not _lmcache[0].is_running:
        _lmcache[0].start()
    return _lmcache[0]


def new_prefix() -> str:
    """For names that nobody else has on a server which cannot be emptied."""
    return f"test:{next(_numbers)}:"


def _on_lmcache(clock: Clock) -> StoreServer:
    server, prefix = running_lmcache(), new_prefix()
    return StoreServer(
        lambda: LMCacheStore(server.url, prefix=prefix, clock_s=clock),
        server.kill,
        server.start,
        clock,
    )


def stop_lmcache() -> None:
    while _lmcache:
        _lmcache.pop().close()
