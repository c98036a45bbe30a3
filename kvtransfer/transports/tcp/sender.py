"""P's end of tcp: bytes go from the pool into the socket."""

from __future__ import annotations

import socket

from core.kv_layout import KVLayout
from kvtransfer.config import TransferConfig
from kvtransfer.counters import TransferCounters
from kvtransfer.events import PostEvent
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.sender import LinkSender
from kvtransfer.transports.outbox import Outbox, OutgoingRun
from kvtransfer.transports.tcp import sockets


class TcpSender(LinkSender):
    """`transports.base.Sender` over tcp. pool: all bytes, block after block."""

    def __init__(
        self, pool: memoryview, layout: KVLayout, post: PostEvent, config: TransferConfig
    ) -> None:
        outbox = Outbox(pool, layout, post, TransferCounters())
        super().__init__("tcp", outbox, _TcpCarrier(outbox), post, config)


class _TcpCarrier:
    """See OutboundCarrier: a frame, then the run's bytes where they lie."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def connect(self, address: str) -> socket.socket:
        """See OutboundCarrier.connect. address: a numeric host and a port."""
        return sockets.start_connect(address)

    def greet(self, sock: socket.socket, hello: bytes) -> None:
        """See OutboundCarrier.greet."""
        sock.send(hello)

    def pieces(self, run: OutgoingRun) -> list[memoryview]:
        """See OutboundCarrier.pieces."""
        payload = self._outbox.payload(run)
        return [memoryview(wire.pack_run(run.header(payload))), payload]

    def bytes_beside(self, run: OutgoingRun) -> int:
        """See OutboundCarrier.bytes_beside."""
        return 0
