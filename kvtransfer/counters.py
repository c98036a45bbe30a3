"""What movers count: one record a side, read by anyone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter


@dataclass(slots=True)
class TransferCounters:
    """Counters since the start (`*_total`) and gauges as of now. A reader may see a value one event
    old.

    sent_bytes_total, received_bytes_total: payload bytes over the wire, scratch included.
    sent_runs_total, admitted_runs_total: runs wholly sent; runs that became part of a session's
        coverage.
    late_runs_total: runs that went to scratch because their session had ended or its permit was
        gone.
    duplicate_runs_total: runs that went to scratch because coverage had them already.
    checksum_errors_total: runs whose bytes were not those that were announced.
    refused_connections_total: connections closed because the peer showed no right to write.
    refused_sessions_total: sessions turned down on a connection that lives on.
    connections_lost_total: connections that ended other than by our own close.
    blocks_acknowledged_total: blocks of which D has acknowledged every layer.
    pushed_bytes_total: bytes that the engine thread has pushed.
    settled_bytes_total: bytes of those that D has acknowledged, or that are not to be sent any more.
    blocks_outstanding: blocks of open sessions that were pushed and are not wholly acknowledged.
    """

    sent_bytes_total: int = 0
    received_bytes_total: int = 0
    sent_runs_total: int = 0
    admitted_runs_total: int = 0
    late_runs_total: int = 0
    duplicate_runs_total: int = 0
    checksum_errors_total: int = 0
    refused_connections_total: int = 0
    refused_sessions_total: int = 0
    connections_lost_total: int = 0
    blocks_acknowledged_total: int = 0
    pushed_bytes_total: int = 0
    settled_bytes_total: int = 0
    blocks_outstanding: int = 0

    @property
    def bytes_outstanding(self) -> int:
        """Bytes that were pushed and are still to arrive."""
        return self.pushed_bytes_total - self.settled_bytes_total

    @classmethod
    def sum_of(cls, counters: Iterable[TransferCounters]) -> TransferCounters:
        """All of them as one, as of now."""
        return cls(*map(sum, zip(*map(_figures, counters), strict=True)))


_figures = attrgetter(*(field.name for field in fields(TransferCounters)))
