"""A shared store in memory, with a server whose faults a test chooses; it keeps the promises of every BlockStore."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvtransfer.tiers.remote.reached_store import ReachedStore
from kvtransfer.tiers.remote.store import Fetch, StoreRefused, num_bytes


class MemoryServer:
    """Values by name, as a fleet shares them.

    is_up: whether connections are accepted and kept.
    max_bytes: of all values; more is refused.
    calls: names of the calls that were answered or refused, in order.
    before: called with the name of each call before it is answered, on the caller's thread; may wait, or raise OSError.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self.is_up = True
        self.max_bytes = max_bytes
        self.calls: list[str] = []
        self.num_connects = 0
        self.before: Callable[[str], None] = lambda call: None
        self._lock = threading.Lock()

    def used_bytes(self) -> int:
        return sum(map(len, self.values.values()))

    def flip(self, name: str, byte: int, bits: int = 4) -> None:
        """Turn bits of a value, if there is one."""
        if name not in self.values:
            return
        value = bytearray(self.values[name])
        value[byte] ^= bits
        self.values[name] = bytes(value)

    def kill(self) -> None:
        """Be gone."""
        self.is_up = False

    def restart(self) -> None:
        """Come back empty."""
        self.values.clear()
        self.is_up = True

    def connect(self) -> _MemoryConversation:
        self.num_connects += 1
        if not self.is_up:
            raise ConnectionRefusedError("nobody listens")
        return _MemoryConversation(self)

    def answer(self, call: str) -> dict[str, bytes]:
        if not self.is_up:
            raise ConnectionResetError("the server is gone")
        self.before(call)
        self.calls.append(call)
        return self.values

    def put(self, name: str, value: bytes) -> bool:
        with self._lock:
            values = self.answer("put")
            if name in values:
                return False
            if self.max_bytes is not None and self.used_bytes() + len(value) > self.max_bytes:
                raise StoreRefused("there is no room")
            values[name] = value
            return True


class _MemoryConversation:
    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def exist(self, names: Sequence[str]) -> list[bool]:
        values = self.server.answer("exist")
        return [name in values for name in names]

    def add(self, name: str, parts: Sequence[memoryview]) -> bool:
        return self.server.put(name, b"".join(parts))

    def get_into(self, name: str, parts: Sequence[memoryview]) -> Fetch:
        value = self.server.answer("get").get(name)
        if value is None:
            return Fetch.ABSENT
        if len(value) != num_bytes(parts):
            return Fetch.WRONG
        for part in parts:
            part[:], value = value[: len(part)], value[len(part) :]
        return Fetch.WHOLE

    def delete(self, names: Sequence[str]) -> None:
        values = self.server.answer("delete")
        for name in names:
            values.pop(name, None)


class MemoryStore(ReachedStore):
    """One process's way to a MemoryServer."""

    def __init__(self, server: MemoryServer, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__("memory", server.connect, clock_s)
        self.server = server
