"""The two kinds of children a local cluster has: workers and the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from core.errors import ServeError
from core.worker_info import Role
from services.cluster.child import GatewaySpec, WorkerSpec
from services.cluster.ports import KEEPS_PORTS, HeldPort
from services.cluster.probe import wait_until_healthy
from services.cluster.process import ChildProcess, start_child
from services.cluster.supervisor import Supervisor
from services.gateway.config import GatewayConfig
from services.rpc.status import error_of_kind
from services.worker.config import WorkerConfig
from services.worker.status_pipe import Failed, Listening, Progress, Ready, decode_status

_STATUS_END_S = 1.0


class WorkerChild(Supervisor):
    """A worker. It keeps its name and its ports over all its lives, so that its seed address stays
    true.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        config: WorkerConfig,
        engine_command: Sequence[str],
        say: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        super().__init__(name, say, show)
        self.listening = asyncio.Event()
        """Set once its address is known."""
        self.control_address = ""
        self.metrics_port = 0
        self.models: list[str] = []
        self._config = replace(
            config, engine=replace(config.engine, role=role), worker_id=name, metrics_port=0
        )
        self._engine_command = list(engine_command)
        self._failed: Failed | None = None
        self._status_ended: asyncio.Future[None] | None = None
        self._held: list[HeldPort] = []

    async def stop(self, seconds: float) -> None:
        """See `Supervisor.stop`."""
        await super().stop(seconds)
        for port in self._held:
            port.close()

    async def _start(self) -> ChildProcess:
        self._hold_ports()
        status_read, status_write = os.pipe()
        try:
            spec = WorkerSpec(os.getpid(), self._config, status_write, self._engine_command)
            process = await start_child(spec, self._show, [status_write])
        finally:
            os.close(status_write)
        self._status_ended = await _read_lines(status_read, self._on_status_line)
        return process

    def _hold_ports(self) -> None:
        """Keep its ports from others between two lives; where none can be kept, its first life finds some."""
        if self._config.port or not KEEPS_PORTS:
            return
        with contextlib.suppress(OSError):  # no descriptor left: the worker may find some yet
            self._held = [HeldPort(self._config.host) for _ in range(2)]
            control, metrics = self._held
            self._config = replace(self._config, port=control.port, metrics_port=metrics.port)

    async def _settle(self) -> None:
        if self._status_ended is not None:
            await asyncio.wait([self._status_ended], timeout=_STATUS_END_S)

    def _refusal(self) -> ServeError | None:
        failed = self._failed
        return error_of_kind(failed.error_kind, failed.message) if failed else None

    def _on_status_line(self, line: bytes) -> None:
        match decode_status(line):
            case Listening() as status:
                port = int(status.control_address.rpartition(":")[2])
                self._config = replace(self._config, port=port, metrics_port=status.metrics_port)
                self.control_address = status.control_address
                self.metrics_port = status.metrics_port
                self.listening.set()
            case Progress() as status:
                self._say(f"{self.name}: {status.message}")
            case Ready() as status:
                self.models = status.models
                self.mark_ready()
            case Failed() as status:
                self._failed = status


class GatewayChild(Supervisor):
    """The gateway, on a socket that the launcher holds: a new life takes over connections that
    wait.
    """

    def __init__(
        self,
        config: GatewayConfig,
        listener: socket.socket,
        say: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        super().__init__("gateway", say, show)
        self._config = config
        self._listener = listener
        self._probe: asyncio.Task[None] | None = None

    async def _start(self) -> ChildProcess:
        spec = GatewaySpec(os.getpid(), self._config, self._listener.fileno())
        process = await start_child(spec, self._show, [self._listener.fileno()])
        self._probe = asyncio.create_task(self._await_health())
        return process

    async def _settle(self) -> None:
        if self._probe is not None:
            self._probe.cancel()

    async def _await_health(self) -> None:
        await wait_until_healthy(self._config.host, self._config.port)
        self.mark_ready()


class _Lines(asyncio.Protocol):
    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def _read_lines(fd: int, on_line: Callable[[bytes], None]) -> asyncio.Future[None]:
    """Call on_line for every line; the future is done when the other end is closed."""
    lines = _Lines(on_line)
    # The transport owns the file, and closes it at its end.
    file = os.fdopen(fd, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: lines, file)
    return lines.ended
