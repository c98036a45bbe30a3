"""Everything a worker's front is told when it starts; its engine's part is `engine.config`."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.errors import ConfigError
from engine.config import EngineConfig
from kvindex.config import IndexConfig

MAX_PORT = 65_535
LEAST_SILENCE_MS = 1_000
"""A live engine says something within three quarters of it, also when it is idle."""

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker, front and engine. Each field names its flag where the flag differs.

    engine: what the engine process is told.
    index: where the worker registers; an empty redis_url serves by seed address only.
    worker_id: name of this worker, stable over restarts; empty derives one from host name and port.
    host: address the control service listens on.
    port: port of the control service, 0 for any free one.
    advertise_host: host name under which others reach this worker; empty takes --host, or the
        machine's name where --host is a wildcard.
    served_model_names: names clients may use, the first is the default (`--served-model-name`);
    empty
        derives one from the model.
    metrics_port: port of the HTTP endpoint for /metrics and /health, on --host; -1 for none, 0 for
        any free one.
    engine_silence_ms: how long the engine may say nothing before others stop counting on it.
    engine_death_ms: how long the engine may say nothing before it is killed and the worker ends.
    drain_ms: how long running requests may go on after a request to stop.
    log_level: least severity that is logged.
    """

    engine: EngineConfig
    index: IndexConfig = field(default_factory=IndexConfig)
    worker_id: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    served_model_names: tuple[str, ...] = ()
    metrics_port: int = -1
    engine_silence_ms: int = 5_000
    engine_death_ms: int = 30_000
    drain_ms: int = 0
    log_level: str = "info"

    def __post_init__(self) -> None:
        _check_range("port", self.port, 0, MAX_PORT)
        _check_range("metrics-port", self.metrics_port, -1, MAX_PORT)
        _check_range("drain-ms", self.drain_ms, 0, 3_600_000)
        _check_range("engine-silence-ms", self.engine_silence_ms, LEAST_SILENCE_MS, 3_600_000)
        _check_range("engine-death-ms", self.engine_death_ms, self.engine_silence_ms, 3_600_000)
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"--log-level: {self.log_level!r} is unknown; known: {', '.join(LOG_LEVELS)}"
            )
        if not self.host:
            raise ConfigError("--host: must not be empty; 0.0.0.0 listens on every address")
        if any(not name for name in self.served_model_names):
            raise ConfigError("--served-model-name: must not be empty")


def _check_range(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{flag}: {value} must be in [{low}, {high}]")
