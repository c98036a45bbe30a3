"""P's end of tcp: bytes go from the pool into the socket."""

from __future__ import annotations

import socket

from core.kv_layout import KVLayout
from kvtransfer.config import TransferConfig
from kvtransfer.counters import TransferCounters
from kvtransfer.events import PostEvent
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.sender import LinkSender
from kvtransfer.transports.links.token_bucket import TokenBucket
from kvtransfer.transports.links.wire import Announcement
from kvtransfer.transports.outbox import Outbox
from kvtransfer.transports.outgoing import OutgoingRun
from kvtransfer.transports.tcp import sockets

MAX_RUN_BLOCKS = 32
"""Most blocks of one run; with their frame they fit one call to the socket."""


class TcpSender(LinkSender):
    """`transports.base.Sender` over tcp. pool: all bytes of what this rank holds, block after block."""

    def __init__(
        self,
        pool: memoryview,
        layout: KVLayout,
        post: PostEvent,
        config: TransferConfig,
        rank: int = 0,
    ) -> None:
        bucket = TokenBucket(config.link_rate_bytes_s)
        outbox = Outbox(
            pool, layout, post, TransferCounters(),
            window_bytes=config.window_bytes, rank=rank,
            max_run_blocks=MAX_RUN_BLOCKS, max_run_bytes=bucket.slice_bytes,
        )  # fmt: skip
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
        payloads = self._outbox.payloads(run)
        if len(payloads) == 1:
            return [memoryview(wire.pack_run(run.header(payloads[0]))), payloads[0]]
        session, attempt = run.session.key
        announcement = Announcement(
            True, attempt, session, 0, run.group, run.first_layer, run.num_layers,
            len(payloads), run.place.offset_bytes, run.place.num_bytes, run.number,
        )  # fmt: skip
        checksums = self._outbox.checksums(run)
        entries = [
            (position, valid_slots, block, checksum, 0)
            for (position, block, valid_slots), checksum in zip(run.sources, checksums, strict=True)
        ]
        return [memoryview(wire.pack_runs(announcement, entries)), *payloads]

    def bytes_beside(self, run: OutgoingRun) -> int:
        """See OutboundCarrier.bytes_beside."""
        return 0
