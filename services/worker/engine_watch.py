"""Whether the engine still speaks. A live engine says something within a second, also when it is idle.

    HEARD   within the silence limit
    SILENT  beyond it: sessions of other workers end, loads are no longer reported, the lease is not renewed
    DEAD    beyond the death limit: the process is killed, and the worker ends with it

A stopped, swapped or wedged engine is found this way although its front lives on. What it says later is heard again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_LOOKS_A_LIMIT = 10
"""How often within the silence limit somebody looks."""


class EngineWatch:
    """Times between messages of one engine, from `begin` on."""

    def __init__(
        self,
        silence_ms: int,
        death_ms: int,
        on_silent: Callable[[], None],
        on_dead: Callable[[], None],
    ) -> None:
        """on_silent: called when the engine falls silent, and again at each look while it is."""
        self._silence_s, self._death_s = silence_ms / 1000, death_ms / 1000
        self._on_silent, self._on_dead = on_silent, on_dead
        self._heard_at_s = time.monotonic()

    def heard(self) -> None:
        """The engine said something."""
        self._heard_at_s = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether nothing has been heard for longer than the silence limit."""
        return self._silent_for_s > self._silence_s

    async def run(self) -> None:
        """Look until the engine is dead."""
        self.heard()
        while self._silent_for_s <= self._death_s:
            await asyncio.sleep(self._silence_s / _LOOKS_A_LIMIT)
            if self.is_silent:
                self._on_silent()
        self._on_dead()

    @property
    def _silent_for_s(self) -> float:
        return time.monotonic() - self._heard_at_s
