"""What every shared store promises: named values of bytes, reached over a network, that any worker may find.

- Any thread may call; calls of several threads run side by side.
- A call takes a bounded time: CONNECT_TIMEOUT_S to reach the store, ANSWER_TIMEOUT_S to hear from it.
- A store that does not answer is away, and then is not asked for a while: calls fail at once, so that it costs one
  wait and not one a block. Somebody's next call after that finds out whether it is back.
- Questions (`count_leading`, `get_into`) never raise for it: what cannot be asked is not there. Changes (`put`,
  `delete`) raise an OSError, because who asked for one must know that it may not have happened.
- A store is a cache that others share: a value may vanish, or be something else, at any moment. Who reads verifies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 2.0

NAMES_AT_ONCE = 512
"""Names that go into one round trip."""


class StoreAway(OSError):
    """The store does not answer, or did not just now and is not asked."""


class StoreRefused(OSError):
    """The store answers and does not do it: it is full, say."""


class Fetch(Enum):
    """How a read ended.

    WHOLE: there are as many bytes as asked for, and all of them are here.
    ABSENT: there is nothing under that name.
    WRONG: there is something else, or it broke off.
    AWAY: the store gave no answer.
    """

    WHOLE = auto()
    ABSENT = auto()
    WRONG = auto()
    AWAY = auto()


@dataclass(slots=True)
class StoreCounters:
    """Counters since the start. A reader on another thread may see a value one event old.

    failures_total: calls that ended without an answer; calls that were not tried are not counted.
    outages_total: times that the store went away.
    refusals_total: calls that the store answered with a refusal.
    """

    failures_total: int = 0
    outages_total: int = 0
    refusals_total: int = 0


class BlockStore(ABC):
    """A shared store of named values.

    Names are `SPACE:HEX`: the first part says whose values these are, the second is hexadecimal digits. place: where
    the store is, for people, without credentials.
    """

    place: str
    counters: StoreCounters

    @property
    @abstractmethod
    def is_away(self) -> bool:
        """Whether calls fail at once now. Asks nobody."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether it refused a change just now, for want of room or of leave. Asks nobody."""

    @abstractmethod
    def count_leading(self, names: Sequence[str]) -> int:
        """How many leading names have a value: a round trip for each NAMES_AT_ONCE of them. A hint."""

    @abstractmethod
    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Make the parts, one after the other, a name's value; False where it has one already, which stays.

        Raises OSError where the store does not say that it is done; then it may be done all the same.
        """

    @abstractmethod
    def get_into(self, name: str, parts: Sequence[memoryview]) -> Fetch:
        """Fill the parts, one after the other, from a name's value; anything but WHOLE leaves bytes of no meaning."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """These names have no value any more. Raises OSError where the store does not say so."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections; later calls fail. Idempotent."""


def num_bytes(parts: Sequence[memoryview]) -> int:
    """Bytes of a value in parts."""
    return sum(part.nbytes for part in parts)
