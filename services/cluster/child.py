"""The entry of a child process of the launcher: `python -m services.cluster.child worker|gateway`.

The spec comes through standard input, so that no key or password shows in a process list. Imports
what the process
runs and nothing else: a gateway never sees torch, a worker never sees a web framework.
"""

from __future__ import annotations

import socket
import sys

import msgspec

from services.cluster.parent import end_with_parent
from services.config.logs import configure_logging
from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig


class WorkerSpec(msgspec.Struct, frozen=True, tag=True):
    """A worker to run. engine_command: empty for the real engine."""

    parent_pid: int
    config: WorkerConfig
    status_fd: int
    engine_command: list[str] = []


class GatewaySpec(msgspec.Struct, frozen=True, tag=True):
    """A gateway to run on a socket that the launcher listens on."""

    parent_pid: int
    config: GatewayConfig
    listen_fd: int


ChildSpec = WorkerSpec | GatewaySpec


def main() -> int:
    """Run the process that standard input describes; returns its exit status."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildSpec)
    end_with_parent(spec.parent_pid)
    configure_logging(spec.config.log_level)
    if isinstance(spec, GatewaySpec):
        return _run_gateway(spec)
    from services.worker.engine_client import ENGINE_COMMAND
    from services.worker.main import run_worker

    command = spec.engine_command or ENGINE_COMMAND
    return run_worker(spec.config, status_fd=spec.status_fd, engine_command=command)


def _run_gateway(spec: GatewaySpec) -> int:
    from services.gateway.main import run_until_stopped

    listener = socket.socket(fileno=spec.listen_fd)
    listener.setblocking(False)
    run_until_stopped(spec.config, listener=listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
