"""Keeps one child running: starts it, starts it again when it dies, gives up in the end.

STARTING --ready--> UP --dies--> WAITING --backoff--> STARTING
STARTING, never ready before --dies--> refused: `run` raises, with the reason in one sentence
WAITING, MAX_DEATHS deaths without STABLE_S of service in between --> given up: `run` raises
any --stop--> STOPPED
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from core.errors import ServeError
from services.cluster.process import ChildProcess, describe_exit

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
MAX_DEATHS = 8
STABLE_S = 20.0


class GivenUp(ServeError):
    """A child that served before died too often in a row."""


class Supervisor(ABC):
    """One child, over all its lives. say: shows the user a sentence; show: shows one of its log
    lines.
    """

    def __init__(self, name: str, say: Callable[[str], None], show: Callable[[str], None]) -> None:
        self.name = name
        self.ready = asyncio.Event()
        """Set while the child serves."""
        self._say = say
        self._show = show
        self._process: ChildProcess | None = None
        self._stopping = asyncio.Event()
        self._was_ready = False
        self._ready_since_s = 0.0
        self._num_deaths = 0

    @property
    def pid(self) -> int | None:
        """Process id of the present life, None between two."""
        return self._process.pid if self._process else None

    def mark_ready(self) -> None:
        """The child serves now."""
        if self._was_ready:
            self._say(f"{self.name} serves again")
        self._was_ready = True
        self._ready_since_s = time.monotonic()
        self.ready.set()

    async def run(self) -> None:
        """Keep the child running until `stop`; raises when it refuses to start, or when it is given
        up.
        """
        while not self._stopping.is_set():
            self._process = await self._start()
            if self._stopping.is_set():  # asked to stop while it was starting
                await self._process.stop(0.0)
                return
            status = await self._process.wait()
            self._process.kill_group()  # an engine must not outlive its front
            await self._settle()
            if not self._stopping.is_set():
                await self._after_death(status, self._process)

    async def stop(self, seconds: float) -> None:
        """End the child for good; killed when it takes longer than this. Idempotent."""
        self._stopping.set()
        if self._process is not None:
            await self._process.stop(seconds)

    def kill(self) -> None:
        """End the child for good and at once, its own children included."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill_group()

    @abstractmethod
    async def _start(self) -> ChildProcess:
        """Start one life."""

    async def _settle(self) -> None:  # noqa: B027 - most children have nothing to wait for
        """Wait until everything that a dead child has said is heard; bounded."""

    def _refusal(self) -> ServeError | None:
        """What the child said of why it cannot serve, if it said so."""
        return None

    async def _after_death(self, status: int, process: ChildProcess) -> None:
        served_s = time.monotonic() - self._ready_since_s if self.ready.is_set() else 0.0
        self.ready.clear()
        self._process = None
        how = describe_exit(status)
        if not self._was_ready:
            last = next((line for line in reversed(process.last_lines) if line.strip()), "")
            raise self._refusal() or ServeError(f"{self.name} did not start ({how}): {last}")
        self._num_deaths = 1 if served_s >= STABLE_S else self._num_deaths + 1
        if self._num_deaths > MAX_DEATHS:
            raise GivenUp(f"{self.name} died {self._num_deaths} times in a row; it stays down")
        delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._num_deaths - 1))
        self._say(f"{self.name} died ({how}); starting it again in {delay_s:g} s")
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            pass
