"""An engine between two ends of one process: a read is a memmove, at a moment that a test may choose."""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import TransferError
from kvtransfer.transports.pull.engine import Read, address_of


@dataclass
class Network:
    """What the engines of a test share, and how they are disturbed.

    is_held: reads begin and do not end. num_failures: so many of the next reads fail at their end.
    before_read: called with the number of the read, counted from 1, before its bytes are moved.
    """

    memory: dict[bytes, list[tuple[int, int]]] = field(default_factory=dict)
    is_held: bool = False
    num_failures: int = 0
    num_begun: int = 0
    before_read: object = None
    met: list[bytes] = field(default_factory=list)
    left: list[bytes] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryEngine:
    """See pull.engine.Engine."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.name = secrets.token_hex(8).encode()
        self.is_closed = False
        network.memory[self.name] = []

    def register(self, memory: memoryview) -> int:
        address = address_of(memory)
        self.network.memory[self.name].append((address, address + len(memory)))
        return address

    def unregister(self, address: int) -> None:
        pieces = self.network.memory.get(self.name, [])
        pieces[:] = [piece for piece in pieces if piece[0] != address]

    def describe(self) -> bytes:
        return self.name

    def meet(self, description: bytes, epoch: bytes) -> MemoryPeer:
        if description not in self.network.memory:
            raise TransferError(f"nobody is called {description!r}")
        self.network.met.append(description)
        return MemoryPeer(self, description)

    def close(self) -> None:
        self.is_closed = True
        self.network.memory.pop(self.name, None)

    def check(self, owner: bytes, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """ConnectionError unless all pieces lie in memory that an end has registered."""
        for address, size in zip(addresses, sizes, strict=True):
            regions = self.network.memory.get(owner, [])
            if not any(first <= address and address + size <= end for first, end in regions):
                raise ConnectionError(f"{owner!r} has not registered {size} bytes at {address}")


class MemoryPeer:
    """See pull.engine.Peer."""

    def __init__(self, engine: MemoryEngine, name: bytes) -> None:
        self._engine, self._name = engine, name
        self._is_closed = False

    def read(self, own: Sequence[int], theirs: Sequence[int], num_bytes: Sequence[int]) -> Read:
        assert not self._is_closed
        self._engine.check(self._engine.name, own, num_bytes)
        self._engine.check(self._name, theirs, num_bytes)
        self._engine.network.num_begun += 1
        return MemoryRead(self._engine, self._name, own, theirs, num_bytes)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._engine.network.left.append(self._name)


class MemoryRead:
    """See pull.engine.Read."""

    def __init__(
        self,
        engine: MemoryEngine,
        name: bytes,
        own: Sequence[int],
        theirs: Sequence[int],
        num_bytes: Sequence[int],
    ) -> None:
        self._engine, self._name = engine, name
        self._pieces = own, theirs, num_bytes
        self._number = engine.network.num_begun

    def is_over(self) -> bool:
        network = self._engine.network
        assert not self._engine.is_closed, "a read is asked after its engine has ended"
        if network.is_held:
            return False
        if network.num_failures:
            network.num_failures -= 1
            raise ConnectionError("the engine lost its peer")
        if callable(network.before_read):
            network.before_read(self._number)
        own, theirs, num_bytes = self._pieces
        self._engine.check(self._name, theirs, num_bytes)
        for to, start, size in zip(own, theirs, num_bytes, strict=True):
            ctypes.memmove(to, start, size)
        return True
