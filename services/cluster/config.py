"""Everything the launcher of a local cluster is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError
from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig

MAX_WORKERS = 64


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """One machine's cluster. Each field names its flag where the flag differs.

    worker: what every worker is told; its role, name, address and port are the launcher's to set.
    gateway: what the gateway is told; its seeds are the launcher's to set.
    num_prefill: prefill workers; naming any of the three counts makes the others 0 (`--prefill`).
    num_decode: decode workers (`--decode`).
    num_mixed: workers that do both (`--mixed`).
    verbose: whether the log lines of all processes are shown.
    """

    worker: WorkerConfig
    gateway: GatewayConfig
    num_prefill: int = 1
    num_decode: int = 1
    num_mixed: int = 0
    verbose: bool = False

    def __post_init__(self) -> None:
        for flag, count in (
            ("prefill", self.num_prefill),
            ("decode", self.num_decode),
            ("mixed", self.num_mixed),
        ):
            if not 0 <= count <= MAX_WORKERS:
                raise ConfigError(f"--{flag}: {count} must be in [0, {MAX_WORKERS}]")
        if self.num_decode + self.num_mixed == 0:
            raise ConfigError(
                "--decode: at least one decode or mixed worker is needed to serve answers"
            )

    @property
    def num_workers(self) -> int:
        """Workers of all roles."""
        return self.num_prefill + self.num_decode + self.num_mixed
