"""One process's way to a store: connections that are used again, and what happens when the store is away.

    up --a call fails--> away --its pause ends--> one call tries --it works--> up
                           ^-------------------------- it fails: a longer pause

While the store is away every call fails at once, except the one that tries. The first failure of an outage and its
end are logged, and nothing in between. A connection that died while it was idle (the store was restarted) is not an
outage: the call is made once more on a new one, so calls must be such that they can be made twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvtransfer.tiers.remote.store import StoreAway, StoreCounters, StoreRefused

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0

Answer = TypeVar("Answer")


class Connection(Protocol):
    """One conversation with a store; one thread at a time."""

    @property
    def is_open(self) -> bool:
        """Whether it can be used again. A call whose answer was not read to its end has closed it."""

    def close(self) -> None:
        """Idempotent; does not raise."""


Conversation = TypeVar("Conversation", bound=Connection)


class Pause:
    """Doubles each time that it begins anew before an `end`."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._duration_s = 0.0
        self._until_s = 0.0

    @property
    def is_on(self) -> bool:
        """Whether it has begun and not run out."""
        return self._clock_s() < self._until_s

    @property
    def is_over(self) -> bool:
        """Whether it has begun and run out, and nobody has ended it."""
        return self._duration_s > 0 and not self.is_on

    def begin(self) -> bool:
        """Pause from now on; whether this is the first time since `end`."""
        is_first = not self._duration_s
        self._duration_s = min(max(FIRST_PAUSE_S, 2 * self._duration_s), LONGEST_PAUSE_S)
        self._until_s = self._clock_s() + self._duration_s
        return is_first

    def renew(self) -> None:
        """Pause once more as long as before."""
        self._until_s = self._clock_s() + self._duration_s

    def end(self) -> bool:
        """There is nothing to pause for; whether there was."""
        was_begun = self._duration_s > 0
        self._duration_s = self._until_s = 0.0
        return was_begun


class Reach(Generic[Conversation]):
    """Runs calls on connections of its own; as many connections as threads that call at a time.

    place: the store's name for people.
    connect: makes a connection, within CONNECT_TIMEOUT_S; raises OSError.
    """

    def __init__(
        self,
        place: str,
        connect: Callable[[], Conversation],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.place = place
        self.counters = StoreCounters()
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[Conversation] = []
        self._is_closed = False
        self._away = Pause(clock_s)
        self._full = Pause(clock_s)

    @property
    def is_away(self) -> bool:
        """Whether calls fail at once."""
        return self._away.is_on

    @property
    def is_full(self) -> bool:
        """Whether a value was refused just now."""
        return self._full.is_on

    def ask(self, call: Callable[[Conversation], Answer]) -> Answer:
        """The answer of a call. Raises StoreAway, or StoreRefused."""
        self._check_tried()
        try:
            answer = self._run(call)
        except StoreRefused:
            self.counters.refusals_total += 1
            self._note_answer()
            raise
        except OSError as error:
            raise self._note_failure(error) from error
        self._note_answer()
        return answer

    def change(self, call: Callable[[Conversation], bool]) -> bool:
        """The same for a call that changes something: where that is refused, the store is full for a while.

        It says whether it added a value. If it was made twice, and did not the second time, it may have the first
        time, and is taken to have.
        """
        num_tries = 0

        def counted(connection: Conversation) -> bool:
            nonlocal num_tries
            num_tries += 1
            return call(connection)

        try:
            is_added = self.ask(counted) or num_tries > 1
        except StoreRefused as error:
            with self._lock:
                is_first = self._full.begin()
            if is_first:
                logger.warning("remote tier: %s takes no blocks: %s", self.place, error)
            raise
        if is_added:
            with self._lock:
                self._full.end()
        return is_added

    def close(self) -> None:
        """No connection is left, but those in use, which end with their calls. Idempotent."""
        self._is_closed = True
        self._drop_idle()

    # ---- connections

    def _run(self, call: Callable[[Conversation], Answer]) -> Answer:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._use(connection, call)
            except (StoreRefused, TimeoutError):
                raise
            except OSError:
                self._drop_idle()  # it died while it was idle: so did the others
        return self._use(self._connect(), call)

    def _use(self, connection: Conversation, call: Callable[[Conversation], Answer]) -> Answer:
        try:
            answer = call(connection)
        except StoreRefused:
            self._put_back(connection)
            raise
        except BaseException:
            connection.close()  # a late answer must not become another call's
            raise
        self._put_back(connection)
        return answer

    def _put_back(self, connection: Conversation) -> None:
        with self._lock:
            if connection.is_open and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # ---- outages

    def _check_tried(self) -> None:
        if self._is_closed:
            raise StoreAway(f"{self.place} is closed")
        with self._lock:
            if self._away.is_on:
                raise StoreAway(f"{self.place} is away")
            if self._away.is_over:
                self._away.renew()  # this call tries, and others need not wait for it

    def _note_answer(self) -> None:
        with self._lock:
            was_away = self._away.end()
        if was_away:
            logger.warning("remote tier: %s is back", self.place)

    def _note_failure(self, error: OSError) -> StoreAway:
        with self._lock:
            self.counters.failures_total += 1
            is_first = self._away.begin()
            self.counters.outages_total += is_first
        if is_first:
            logger.warning(
                "remote tier: %s is away (%s); its blocks are misses until it is back",
                self.place,
                error,
            )
        return StoreAway(f"{self.place} is away: {error}")
