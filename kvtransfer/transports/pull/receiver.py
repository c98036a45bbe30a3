"""D's end of a transport that reads by an engine: announcements come over tcp, D reads what they name."""

from __future__ import annotations

import socket
import time
from typing import Any

from core.errors import ConfigError, TransferError
from kvtransfer.config import TransferConfig
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links.receiver import LinkReceiver
from kvtransfer.transports.pull.engine import Engine
from kvtransfer.transports.pull.inbound import PullInbound
from kvtransfer.transports.tcp import sockets

_LAST_READS_SECONDS = 1.0
"""How long reads may take to end by themselves when the receiver stops."""


class PullReceiver(LinkReceiver):
    """`transports.base.Receiver` by an engine."""

    def __init__(self, kind: str, engine: Engine, intake: Intake, config: TransferConfig) -> None:
        """engine: owned from now on. Raises ConfigError where it cannot be used."""
        self._engine = engine
        try:
            self._pool_address = engine.register(intake.pool)
        except TransferError as error:
            engine.close()
            raise ConfigError(f"--kv-transports: {kind}: {error.message}") from error
        try:
            listener = sockets.listen(config.data_host)
        except OSError:
            engine.close()
            raise
        address = sockets.address_of(listener)
        super().__init__(kind, intake, listener, address, self._new_link, config)

    def _new_link(self, sock: socket.socket, *arguments: Any) -> PullInbound:
        sockets.tune(sock)
        return PullInbound(self._engine, self._pool_address, sock, *arguments)

    def _shut(self) -> None:
        super()._shut()
        deadline_s = time.monotonic() + _LAST_READS_SECONDS
        while self._ending and time.monotonic() < deadline_s:
            time.sleep(self._patience.wait_s())
            self._advance()
        self._engine.close()
        for link in self._ending:
            link.abort()
