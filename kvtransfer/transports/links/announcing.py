"""P's part of a connection that carries announcements only: which blocks lie ready, and in which of their lives."""

from __future__ import annotations

from core.kv_layout import KVLayout
from kvtransfer.config import TransferConfig
from kvtransfer.counters import TransferCounters
from kvtransfer.events import PostEvent
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.token_bucket import TokenBucket
from kvtransfer.transports.links.wire import Announcement
from kvtransfer.transports.outbox import Outbox
from kvtransfer.transports.outgoing import OutgoingRun

MAX_RUN_BYTES = 4 << 20
"""Most bytes that a run of several blocks carries, so that sessions take turns."""


def announcing_outbox(
    memory: PoolMemory, layout: KVLayout, post: PostEvent, config: TransferConfig
) -> Outbox:
    """An outbox whose runs are as large as one announcement may be."""
    bucket = TokenBucket(config.link_rate_bytes_s)
    max_bytes = bucket.slice_bytes if bucket.is_limited else MAX_RUN_BYTES
    return Outbox(
        memory.buffer, layout, post, TransferCounters(), window_bytes=config.window_bytes,
        max_run_blocks=wire.MAX_ENTRIES, max_run_bytes=max_bytes, joins_pushes=True,
    )  # fmt: skip


class Announcer:
    """Makes the announcements of one pool. Belongs to the sender's mover thread."""

    def __init__(self, memory: PoolMemory, outbox: Outbox, *, is_checked: bool) -> None:
        """is_checked: whether runs bear checksums."""
        self._memory = memory
        self._outbox = outbox
        self._is_checked = is_checked

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
