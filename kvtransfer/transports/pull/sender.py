"""P's end of a transport that reads by an engine: shows its pool, and says which bytes of it lie ready."""

from __future__ import annotations

import socket

from core.errors import ConfigError, TransferError
from core.kv_layout import KVLayout
from kvtransfer.config import TransferConfig
from kvtransfer.events import PostEvent
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.announcing import Announcer, announcing_outbox
from kvtransfer.transports.links.sender import LinkSender
from kvtransfer.transports.links.wire import RemotePool
from kvtransfer.transports.outbox import Outbox
from kvtransfer.transports.pull.engine import Engine
from kvtransfer.transports.tcp import sockets


class PullSender(LinkSender):
    """`transports.base.Sender` by an engine. What is announced bears checksums, as what goes over tcp does."""

    def __init__(
        self,
        kind: str,
        engine: Engine,
        memory: PoolMemory,
        layout: KVLayout,
        post: PostEvent,
        config: TransferConfig,
    ) -> None:
        """engine: owned from now on. Raises ConfigError where it cannot be used."""
        self._engine = engine
        outbox = announcing_outbox(memory, layout, post, config)
        try:
            carrier = _PullCarrier(memory, layout, outbox, engine)
        except TransferError as error:
            engine.close()
            raise ConfigError(f"--kv-transports: {kind}: {error.message}") from error
        super().__init__(kind, outbox, carrier, post, config)

    @property
    def carries_plans(self) -> bool:
        """See `Sender.carries_plans`: what is read is what lies in the pool."""
        return False

    def close(self) -> None:
        """See `Sender.close`."""
        super().close()
        self._engine.close()


class _PullCarrier(Announcer):
    """See OutboundCarrier: the pool is shown with the first bytes, then announcements."""

    def __init__(
        self, memory: PoolMemory, layout: KVLayout, outbox: Outbox, engine: Engine
    ) -> None:
        super().__init__(memory, outbox, is_checked=True)
        with memoryview(memory.mapping) as whole:  # header and blocks
            address = engine.register(whole)
        description = engine.describe()
        pool = RemotePool(
            len(description), address, memory.header_bytes, layout.block_bytes,
            len(memory.generations), memory.epoch,
        )  # fmt: skip
        self._shown = wire.pack_pool(pool, description)

    def connect(self, address: str) -> socket.socket:
        """See OutboundCarrier.connect. address: a numeric host and a port."""
        return sockets.start_connect(address)

    def greet(self, sock: socket.socket, hello: bytes) -> None:
        """See OutboundCarrier.greet."""
        first = hello + self._shown
        if sock.send(first) < len(first):
            raise ConnectionError("the first bytes do not fit into the socket")
