"""What this gateway has routed and has not seen end: the load that no worker's report counts yet.

One entry a (request, worker) from selection to the request's end. An entry is confirmed when the index holds its
reservation; from then on reports and reservations that are read later count it, and the ledger's copy must not be
counted again. Without an index every entry counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from core.ids import RequestId, WorkerId


@dataclass(slots=True)
class LedgerEntry:
    """One request on one worker.

    num_tokens: prompt tokens the worker has to compute for it.
    confirmed_at: when the index had the reservation, by the ledger's clock; None while it has not.
    """

    request_id: RequestId
    worker_id: WorkerId
    num_tokens: int
    confirmed_at: float | None = None


class RouteLedger:
    """Counts at selection, forgets at the end: idle means empty."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[WorkerId, dict[RequestId, LedgerEntry]] = {}
        self._last_routed: dict[WorkerId, int] = {}
        self._num_routed = 0

    def now(self) -> float:
        """The time by which `confirmed_at` is read."""
        return self._clock()

    def add(self, request_id: RequestId, worker_id: WorkerId, num_tokens: int) -> LedgerEntry:
        """Count a request on a worker from now on."""
        entry = LedgerEntry(request_id, worker_id, num_tokens)
        self._entries.setdefault(worker_id, {})[request_id] = entry
        return entry

    def note_owner(self, worker_id: WorkerId) -> None:
        """Remember that this worker was chosen owner last."""
        self._num_routed += 1
        self._last_routed[worker_id] = self._num_routed

    def confirm(self, entry: LedgerEntry) -> None:
        """The index holds the reservation now."""
        entry.confirmed_at = self._clock()

    def tokens_computed(self, entry: LedgerEntry) -> None:
        """The prompt is computed: the request still runs, its prompt waits no more."""
        entry.num_tokens = 0

    def drop(self, entry: LedgerEntry) -> None:
        """The request has ended on this worker. Idempotent."""
        entries = self._entries.get(entry.worker_id)
        if entries is not None and entries.get(entry.request_id) is entry:
            del entries[entry.request_id]
            if not entries:
                del self._entries[entry.worker_id]

    def num_requests(self, worker_id: WorkerId) -> int:
        """Requests of this gateway on a worker."""
        return len(self._entries.get(worker_id, ()))

    def counts(self, worker_id: WorkerId, unseen_since: float | None = None) -> tuple[int, int]:
        """Requests and prompt tokens on a worker; with a time, only those that a report read then does not count."""
        entries = self._entries.get(worker_id)
        if entries is None:
            return 0, 0
        counted = [
            entry
            for entry in entries.values()
            if unseen_since is None
            or entry.confirmed_at is None
            or entry.confirmed_at > unseen_since
        ]
        return len(counted), sum(entry.num_tokens for entry in counted)

    def last_routed(self, worker_id: WorkerId) -> int:
        """Ordinal of the last route that this worker owns; 0 for none."""
        return self._last_routed.get(worker_id, 0)
