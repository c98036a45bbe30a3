"""D's end of tcp: what arrives is read straight into the pool."""

from __future__ import annotations

import socket
from typing import Any

from core.blocks import BlockLife
from core.kv_layout import KVLayout
from kvtransfer.config import TransferConfig
from kvtransfer.counters import TransferCounters
from kvtransfer.events import PostEvent
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links.receiver import LinkReceiver
from kvtransfer.transports.tcp import sockets
from kvtransfer.transports.tcp.inbound import TcpInbound


class TcpReceiver(LinkReceiver):
    """`transports.base.Receiver` over tcp."""

    def __init__(
        self,
        life: BlockLife,
        pool: memoryview,
        layout: KVLayout,
        post: PostEvent,
        config: TransferConfig,
    ) -> None:
        intake = Intake(life, pool, layout, post, TransferCounters())
        listener = sockets.listen(config.data_host)
        super().__init__("tcp", intake, listener, sockets.address_of(listener), _tuned, config)


def _tuned(sock: socket.socket, *arguments: Any) -> TcpInbound:
    sockets.tune(sock)
    return TcpInbound(sock, *arguments)
