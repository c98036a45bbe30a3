"""What can be set about moving blocks."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError

_WILDCARD_HOSTS = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """One worker's movers.

    worker_name: how this side names itself in the handshake, for the peer's messages and ours.
    data_host: address that the data endpoint listens on, and that senders are told.
    ipc_dir: directory that workers of this host share; KV is handed over in shared memory where
        both ends reach it. "" for never.
    shm_checksums: whether runs in shared memory bear a checksum, as those over tcp do.
    link_rate_bytes_s: limit of what this worker sends over all data links, 0 for none
        (`--link-rate`).
    window_bytes: what of a session may be on its way to one address, unanswered, before it waits
        (`--transfer-window`); a run more than that where one alone is larger.
    max_connect_failures: failures of a peer's connection in a row, without one run answered between,
        before its sessions fail.
    connect_timeout_s: how long one attempt to connect and shake hands may take.
    reconnect_delay_s: pause after the first failure; doubles with each further one.
    """

    worker_name: str = ""
    data_host: str = "127.0.0.1"
    ipc_dir: str = ""
    shm_checksums: bool = False
    link_rate_bytes_s: float = 0.0
    window_bytes: int = 64 << 20
    max_connect_failures: int = 4
    connect_timeout_s: float = 5.0
    reconnect_delay_s: float = 0.05

    def __post_init__(self) -> None:
        if len(self.worker_name.encode()) > 255:
            raise ConfigError(f"worker name: {self.worker_name!r} is longer than 255 bytes")
        if self.data_host in _WILDCARD_HOSTS:
            raise ConfigError(
                f"data host: {self.data_host!r} is no address that a sender can reach; "
                f"name one of this machine's"
            )
        _check_least("link-rate", self.link_rate_bytes_s, 0)
        _check_least("transfer-window", self.window_bytes, 1)
        _check_least("max_connect_failures", self.max_connect_failures, 1)
        _check_least("connect_timeout_s", self.connect_timeout_s, 0.001)
        _check_least("reconnect_delay_s", self.reconnect_delay_s, 0)


def _check_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{name}: {value} must be at least {least}")
