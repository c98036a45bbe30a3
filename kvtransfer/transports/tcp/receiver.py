"""D's end of tcp: what arrives is read straight into the pool."""

from __future__ import annotations

import socket
from typing import Any

from kvtransfer.config import TransferConfig
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links.receiver import LinkReceiver
from kvtransfer.transports.tcp import sockets
from kvtransfer.transports.tcp.inbound import TcpInbound


class TcpReceiver(LinkReceiver):
    """`transports.base.Receiver` over tcp."""

    def __init__(self, intake: Intake, config: TransferConfig) -> None:
        listener = sockets.listen(config.data_host)
        super().__init__("tcp", intake, listener, sockets.address_of(listener), _tuned, config)


def _tuned(sock: socket.socket, *arguments: Any) -> TcpInbound:
    sockets.tune(sock)
    return TcpInbound(sock, *arguments)
