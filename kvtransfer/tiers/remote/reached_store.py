"""A store that is reached by conversations: the promises of every store, over what one kind of server speaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvtransfer.tiers.remote.reach import Connection, Reach
from kvtransfer.tiers.remote.store import NAMES_AT_ONCE, BlockStore, Fetch


class Conversation(Connection, Protocol):
    """A connection to one kind of server; one thread at a time, each call within ANSWER_TIMEOUT_S.

    Calls raise StoreRefused where the server says no, and other OSErrors where it does not answer. Each may be made
    twice. The names of one call are at most NAMES_AT_ONCE.
    """

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which of these names have a value, in one round trip."""

    def add(self, name: str, parts: Sequence[memoryview]) -> bool:
        """See BlockStore.put."""

    def get_into(self, name: str, parts: Sequence[memoryview]) -> Fetch:
        """See BlockStore.get_into; never AWAY."""

    def delete(self, names: Sequence[str]) -> None:
        """See BlockStore.delete."""


class ReachedStore(BlockStore):
    """place: the store's name for people. connect: begins a conversation, within CONNECT_TIMEOUT_S; raises OSError."""

    def __init__(
        self,
        place: str,
        connect: Callable[[], Conversation],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.place = place
        self._reach = Reach(place, connect, clock_s)
        self.counters = self._reach.counters

    @property
    def is_away(self) -> bool:
        """See BlockStore.is_away."""
        return self._reach.is_away

    @property
    def is_full(self) -> bool:
        """See BlockStore.is_full."""
        return self._reach.is_full

    def count_leading(self, names: Sequence[str]) -> int:
        """See BlockStore.count_leading."""
        num_found = 0
        try:
            for batch in _batches(names):
                there = self._exist(batch)
                if not all(there):
                    return num_found + there.index(False)
                num_found += len(there)
        except OSError:
            pass  # what is known of the head is still right
        return num_found

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """See BlockStore.put."""
        return self._reach.change(lambda server: server.add(name, parts))

    def get_into(self, name: str, parts: Sequence[memoryview]) -> Fetch:
        """See BlockStore.get_into."""
        try:
            return self._reach.ask(lambda server: server.get_into(name, parts))
        except OSError:
            return Fetch.AWAY

    def delete(self, names: Sequence[str]) -> None:
        """See BlockStore.delete."""
        for batch in _batches(names):
            self._delete(batch)

    def close(self) -> None:
        """See BlockStore.close."""
        self._reach.close()

    def _exist(self, names: Sequence[str]) -> list[bool]:
        return self._reach.ask(lambda server: server.exist(names))

    def _delete(self, names: Sequence[str]) -> None:
        def delete(server: Conversation) -> bool:
            server.delete(names)
            return False

        self._reach.change(delete)


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), NAMES_AT_ONCE):
        yield names[start : start + NAMES_AT_ONCE]
