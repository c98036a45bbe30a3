"""P's end of shm: says which bytes of the pool lie ready; D copies them."""

from __future__ import annotations

import os
import socket

from core.kv_layout import KVLayout
from kvtransfer.config import TransferConfig
from kvtransfer.events import PostEvent
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.transports.links.announcing import Announcer, announcing_outbox
from kvtransfer.transports.links.sender import LinkSender
from kvtransfer.transports.shm import sockets


class ShmSender(LinkSender):
    """`transports.base.Sender` through shared memory."""

    def __init__(
        self, memory: PoolMemory, layout: KVLayout, post: PostEvent, config: TransferConfig
    ) -> None:
        outbox = announcing_outbox(memory, layout, post, config)
        carrier = _ShmCarrier(memory, outbox, is_checked=config.shm_checksums)
        super().__init__("shm", outbox, carrier, post, config)

    @property
    def carries_plans(self) -> bool:
        """See `Sender.carries_plans`: what is copied is what lies in the pool."""
        return False

    def reaches(self, address: str) -> bool:
        """See `Sender.reaches`: another host has no such path."""
        return os.path.exists(address)


class _ShmCarrier(Announcer):
    """See OutboundCarrier: the pool's descriptor goes with the first bytes, then announcements."""

    def connect(self, address: str) -> socket.socket:
        """See OutboundCarrier.connect. address: a path."""
        return sockets.connect(address)

    def greet(self, sock: socket.socket, hello: bytes) -> None:
        """See OutboundCarrier.greet."""
        socket.send_fds(sock, [hello], [self._memory.descriptor])
