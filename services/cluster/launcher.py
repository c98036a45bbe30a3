"""A whole cluster on one machine: starts every process, says how far it is, and takes all of them
down again.

    1. the HTTP port is bound (in use: one sentence, nothing was started)
    2. the embedded index, unless --redis-url names one
    3. workers, each with its engine; as soon as their addresses are known, the gateway with these
    as seeds
    4. every worker ready and the gateway healthy: the address is shown
    5. a signal, or a child that is given up: gateway, workers, index end in this order, each
    bounded

Promises that no process, shared memory or folder is left, however it ends: children die with the
launcher by the kernel's hand where the launcher itself is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace

from core.errors import ConfigError, ServeError
from core.worker_info import Role
from services.cluster.children import GatewayChild, WorkerChild
from services.cluster.config import ClusterConfig
from services.cluster.supervisor import GivenUp, Supervisor
from services.cluster.valkey import ValkeyServer, start_valkey
from services.cluster.words import Words

WORKER_STOP_S = 10.0
GATEWAY_STOP_S = 3.0
SWEEP_S = 5.0
SAME_SIGNAL_S = 0.3
"""A signal to a process and to its group arrives twice: within this time that is one wish."""
_BACKLOG = 2048


class Launcher:
    """One cluster, from `run` to its return. engine_command: empty for the real engine."""

    def __init__(
        self, config: ClusterConfig, words: Words, engine_command: Sequence[str] = ()
    ) -> None:
        self._config = config
        self._words = words
        self._engine_command = engine_command
        self._stop_asked = asyncio.Event()
        self._asked_s = 0.0
        self._valkey: ValkeyServer | None = None
        self._listener: socket.socket | None = None
        self._tasks: dict[asyncio.Task[None], Supervisor] = {}
        self.workers: list[WorkerChild] = []
        self.gateway: GatewayChild | None = None

    @property
    def port(self) -> int:
        """The HTTP port."""
        assert self._listener is not None
        port: int = self._listener.getsockname()[1]
        return port

    def ask_stop(self) -> None:
        """Take the cluster down; a second time, without waiting for anything."""
        now_s = time.monotonic()
        if not self._stop_asked.is_set():
            self._asked_s = now_s
            self._stop_asked.set()
        elif now_s - self._asked_s > SAME_SIGNAL_S:
            for child in self._tasks.values():
                child.kill()

    async def run(self) -> None:
        """Serve until asked to stop; raises the one error that explains why it cannot."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.ask_stop)
        started_s = time.monotonic()
        try:
            self._listener = bind(self._config.gateway.host, self._config.gateway.port)
            await self._start()
            if await self._wait_until(self._all_ready()):
                self._words.serving(
                    self._config.gateway.host,
                    self.port,
                    self.workers,
                    time.monotonic() - started_s,
                    has_api_key=bool(self._config.gateway.api_key),
                )
                await self._wait_until(asyncio.Event().wait())
        finally:
            await self._stop()

    async def _start(self) -> None:
        config = self._config
        redis_url = config.worker.index.redis_url
        if not redis_url:
            # Started on this thread: the kernel ends the server with the thread that started it.
            self._valkey = start_valkey()
            redis_url = self._valkey.url
        worker = replace(config.worker, index=replace(config.worker.index, redis_url=redis_url))
        for role, count in (
            (Role.PREFILL, config.num_prefill),
            (Role.DECODE, config.num_decode),
            (Role.MIXED, config.num_mixed),
        ):
            for number in range(1, count + 1):
                name = f"{role.value}-{number}"
                show = self._words.log_of(name)
                child = WorkerChild(name, role, worker, self._engine_command, self._words.say, show)
                self.workers.append(child)
                self._supervise(child)
        if await self._wait_until(_all(child.listening for child in self.workers)):
            self._start_gateway(redis_url)

    def _start_gateway(self, redis_url: str) -> None:
        assert self._listener is not None
        config = self._config.gateway
        gateway = replace(
            config,
            port=self.port,
            seeds=tuple(child.control_address for child in self.workers),
            index=replace(config.index, redis_url=redis_url),
        )
        show = self._words.log_of("gateway")
        self.gateway = GatewayChild(gateway, self._listener, self._words.say, show)
        self._supervise(self.gateway)

    def _supervise(self, child: Supervisor) -> None:
        self._tasks[asyncio.create_task(child.run(), name=child.name)] = child

    async def _all_ready(self) -> None:
        await _all(child.ready for child in self.workers)
        assert self.gateway is not None
        await self.gateway.ready.wait()

    async def _wait_until(self, goal: Coroutine[None, None, object]) -> bool:
        """Wait for the goal; False when asked to stop first, raises when a child ends the cluster
        first.
        """
        work = asyncio.create_task(goal)
        asked = asyncio.create_task(self._stop_asked.wait())
        try:
            while not asked.done():
                waited = {work, asked, *self._tasks}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                self._reap()
                if work.done():
                    work.result()
                    return True
            return False
        finally:
            work.cancel()
            asked.cancel()

    def _reap(self) -> None:
        """Look at children that run no more: one that was given up is left out, any other ends the
        cluster.
        """
        for task in [task for task in self._tasks if task.done()]:
            child = self._tasks.pop(task)
            error = task.exception()
            is_worker = child is not self.gateway
            others_left = any(other is not self.gateway for other in self._tasks.values())
            if isinstance(error, GivenUp) and is_worker and others_left:
                self._words.say(error.message)
            elif error is not None:
                raise error

    async def _stop(self) -> None:
        if self._stop_asked.is_set():
            self._words.say("stopping")
        if self.gateway is not None:
            await self.gateway.stop(self._config.gateway.drain_timeout_s + GATEWAY_STOP_S)
        if self._listener is not None:
            self._listener.close()
        seconds = self._config.worker.drain_ms / 1000.0 + WORKER_STOP_S
        await asyncio.gather(*(child.stop(seconds) for child in self.workers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        _sweep_core_ledger(self._config.worker.engine.core_ledger)
        if self._valkey is not None:
            self._valkey.stop()


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; ConfigError when it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(
            f"--port: {port} on {host} cannot be bound: {reason}; name another with --port"
        ) from None
    listener.setblocking(False)
    return listener


def _sweep_core_ledger(name: str) -> None:
    """Remove the ledger if workers that were killed have left it; any other end does so by itself.

    In a process of its own: this one loads no kernels.
    """
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [sys.executable, "-m", "kernels.cpu.ledger", name]
        subprocess.run(command, check=False, timeout=SWEEP_S)


async def _all(events: Iterable[asyncio.Event]) -> None:
    await asyncio.gather(*(event.wait() for event in events))


def launch(config: ClusterConfig, words: Words, engine_command: Sequence[str] = ()) -> int:
    """Run a cluster on this thread until a signal ends it; returns the exit status."""
    try:
        asyncio.run(Launcher(config, words, engine_command).run())
    except ServeError as error:
        words.refuse(error)
        return 1
    return 0
