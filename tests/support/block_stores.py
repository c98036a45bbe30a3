"""The shared stores that the contract runs over, each with a server of its own that a test may end and start again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtransfer.tiers.remote.redis_store import RedisStore
from kvtransfer.tiers.remote.store import BlockStore
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.support.valkey import running_valkey

STORES = ("memory", "redis", "redis over tcp")


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
    with running_valkey(port=None if kind == "redis" else 0) as valkey:
        url = valkey.url
        yield StoreServer(
            lambda: RedisStore(url, clock_s=clock), valkey.kill, valkey.restart, clock
        )
