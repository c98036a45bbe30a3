"""P's end of shm: says which bytes of the pool lie ready; D copies them."""

from __future__ import annotations

import os
import socket

from core.kv_layout import KVLayout
from kvtransfer.config import TransferConfig
from kvtransfer.counters import TransferCounters
from kvtransfer.events import PostEvent
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.sender import LinkSender
from kvtransfer.transports.links.token_bucket import TokenBucket
from kvtransfer.transports.links.wire import Announcement
from kvtransfer.transports.outbox import Outbox
from kvtransfer.transports.outgoing import OutgoingRun
from kvtransfer.transports.shm import sockets

MAX_RUN_BYTES = 4 << 20
"""Most bytes that a run of several blocks carries, so that sessions take turns."""


class ShmSender(LinkSender):
    """`transports.base.Sender` through shared memory."""

    def __init__(
        self, memory: PoolMemory, layout: KVLayout, post: PostEvent, config: TransferConfig
    ) -> None:
        bucket = TokenBucket(config.link_rate_bytes_s)
        max_bytes = bucket.slice_bytes if bucket.is_limited else MAX_RUN_BYTES
        outbox = Outbox(
            memory.buffer, layout, post, TransferCounters(), window_bytes=config.window_bytes,
            max_run_blocks=wire.MAX_ENTRIES, max_run_bytes=max_bytes,
        )  # fmt: skip
        carrier = _ShmCarrier(memory, outbox, is_checked=config.shm_checksums)
        super().__init__("shm", outbox, carrier, post, config)

    @property
    def carries_plans(self) -> bool:
        """See `Sender.carries_plans`: what is copied is what lies in the pool."""
        return False

    def reaches(self, address: str) -> bool:
        """See `Sender.reaches`: another host has no such path."""
        return os.path.exists(address)


class _ShmCarrier:
    """See OutboundCarrier: the pool's descriptor goes with the first bytes, then announcements."""

    def __init__(self, memory: PoolMemory, outbox: Outbox, *, is_checked: bool) -> None:
        self._memory = memory
        self._outbox = outbox
        self._is_checked = is_checked

    def connect(self, address: str) -> socket.socket:
        """See OutboundCarrier.connect. address: a path."""
        return sockets.connect(address)

    def greet(self, sock: socket.socket, hello: bytes) -> None:
        """See OutboundCarrier.greet."""
        socket.send_fds(sock, [hello], [self._memory.descriptor])

    def pieces(self, run: OutgoingRun) -> list[memoryview]:
        """See OutboundCarrier.pieces: one."""
        session, attempt = run.session.key
        announcement = Announcement(
            self._is_checked, attempt, session, 0, run.group, run.first_layer, run.num_layers,
            len(run.sources), run.place.offset_bytes, run.place.num_bytes, run.number,
        )  # fmt: skip
        generations = self._memory.generations
        checksums = self._outbox.checksums(run) if self._is_checked else [0] * len(run.sources)
        entries = [
            (position, valid_slots, block, checksum, generations[block])
            for (position, block, valid_slots), checksum in zip(run.sources, checksums, strict=True)
        ]
        return [memoryview(wire.pack_runs(announcement, entries))]

    def bytes_beside(self, run: OutgoingRun) -> int:
        """See OutboundCarrier.bytes_beside."""
        return run.num_bytes
