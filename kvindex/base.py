"""What an index of prefixes promises, whatever it is kept in.

Owns the values that cross the seam and the Protocol that `memory` and `redis_index` implement. It holds hints and
leases, never truth about KV:

- A worker is a candidate while its lease runs and it has reported a load since it registered. What is missing never
  reads as idle: no lease or no report, no entry.
- Cache events of one worker#epoch are applied in their order, each exactly once. Numbers that do not follow change
  nothing and answer GAP; the worker then sends a snapshot. An epoch that another one replaced changes nothing, ever.
- `match` on prefix-closed sets equals a walk along the chain; on other sets it is some hint.
- A call that cannot be answered in time raises IndexUnavailable and nothing else, so that callers can go on without.

Life of a worker's entry:

    (none) --register--> REGISTERED --heartbeat--> LIVE --lease runs out, deregister, newer epoch--> (none)
    index: out of step --publish from event 1, or replace--> in step --gap--> unchanged until replace
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from core.block_hash import BlockHash
from core.errors import ServeError
from core.events import CacheEvent, Tier
from core.ids import Epoch, RequestId, WorkerId
from core.worker_info import WorkerInfo, WorkerLoad

LOCAL_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""Tiers that are indexed. A shared remote store is not: workers ask it when they match."""

DEFAULT_SPECULATION_MS = 2_000


class IndexUnavailable(ServeError):
    """The index did not answer in time. Serve without it: no request fails for that."""


class RegisterResult(StrEnum):
    """What became of a registration.

    FRESH: the entry is new and its index empty and out of step: send a snapshot.
    KEPT: this epoch was known; record and lease are renewed, its index stays.
    SUPERSEDED: another epoch took this worker's name since; this one can never come back.
    """

    FRESH = "fresh"
    KEPT = "kept"
    SUPERSEDED = "superseded"


class PublishResult(StrEnum):
    """What became of a batch of events or a snapshot.

    APPLIED: it is in the index (also when an earlier try already put it there).
    GAP: its numbers do not follow what the index has; nothing changed: send a new snapshot.
    STALE_EPOCH: another epoch holds the worker's name; nothing changed.
    UNKNOWN_WORKER: nobody holds the worker's name; nothing changed: register again.
    """

    APPLIED = "applied"
    GAP = "gap"
    STALE_EPOCH = "stale_epoch"
    UNKNOWN_WORKER = "unknown_worker"


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Everything a worker's cache holds, after event `sequence_number` (0 before the first)."""

    sequence_number: int
    hashes: Mapping[Tier, Sequence[BlockHash]]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Work that a gateway has routed to a worker and that the worker's report may not count yet.

    request_id, worker_id: what was routed where; a second reservation of the pair replaces the first.
    gateway_epoch: incarnation of the gateway that routed it, for whoever reads the records.
    num_tokens: prompt tokens the worker will have to compute.
    expiry_ms: milliseconds from now after which the record counts no more.
    """

    request_id: RequestId
    worker_id: WorkerId
    gateway_epoch: Epoch
    num_tokens: int
    expiry_ms: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What is known of a live worker besides its record.

    load: its last report, `named_request_ids` left out (they have done their work in the index).
    load_age_ms: milliseconds since that report, by the index's clock.
    reserved_tokens, num_reservations: routed to it and not yet named by a report.
    last_event_number: the last cache event in its index; None while out of step, so that nothing was ever told.
    index_age_ms: milliseconds since its events were last known to be in step; None as above.
    """

    load: WorkerLoad
    load_age_ms: int
    reserved_tokens: int = 0
    num_reservations: int = 0
    last_event_number: int | None = None
    index_age_ms: int | None = None

    def is_silent(self, max_index_age_ms: int) -> bool:
        """Whether this worker's index cannot be trusted to follow its cache: route by prediction and say so.

        A publisher says at least every `IndexConfig.verify_interval_ms` that it is in step, also without events.
        """
        return self.index_age_ms is None or self.index_age_ms > max_index_age_ms


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A live worker: its record and its report."""

    info: WorkerInfo
    report: WorkerReport

    @property
    def load(self) -> WorkerLoad:
        """The worker's last report of its load."""
        return self.report.load

    @property
    def age_ms(self) -> int:
        """Milliseconds since the worker's last report."""
        return self.report.load_age_ms


@dataclass(frozen=True, slots=True)
class WorkerMatch:
    """How long a prefix of the asked chain one live worker holds.

    device_blocks: hashes from the head held on the device, or expected there (speculative entries).
    local_blocks: hashes from the head held in any local tier; at least device_blocks.
    is_chain_known: False when no chain was given for this worker's hash root, so that the lengths say nothing.
    """

    worker_id: WorkerId
    epoch: Epoch
    device_blocks: int
    local_blocks: int
    is_chain_known: bool
    report: WorkerReport

    @property
    def load(self) -> WorkerLoad:
        """The worker's last report of its load."""
        return self.report.load


@dataclass(slots=True)
class IndexCounters:
    """Counts since the index object was made, for metrics.

    unknown_schema_total: records and workers ignored because their schema version is not ours.
    undecodable_total: records ignored because their content makes no sense.
    failures_total: calls that ended in IndexUnavailable.
    """

    unknown_schema_total: int = 0
    undecodable_total: int = 0
    failures_total: int = 0


class PrefixIndex(Protocol):
    """Which worker holds how much of a chain, who is alive, and how busy each is.

    Every method may raise IndexUnavailable and is safe to repeat after that.
    """

    @property
    def counters(self) -> IndexCounters:
        """What was ignored or failed so far."""
        ...

    async def register(self, info: WorkerInfo, lease_ms: int) -> RegisterResult:
        """Take the worker's name for `info.epoch`. A new epoch ends the old one: its index is gone at once."""
        ...

    async def heartbeat(
        self, worker_id: WorkerId, epoch: Epoch, load: WorkerLoad, lease_ms: int
    ) -> bool:
        """Renew the lease and report the load; drops reservations of the requests it names.

        Returns False when this epoch does not hold the name: register again.
        """
        ...

    async def deregister(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Forget the worker, its index and its reservations, if this epoch holds the name."""
        ...

    async def workers(self) -> list[WorkerState]:
        """All live workers with a readable record, ordered by id."""
        ...

    async def publish(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        first_event_number: int,
        events: Sequence[CacheEvent],
    ) -> PublishResult:
        """Apply events numbered from `first_event_number` (an epoch's first is 1), all or none.

        With no events it asks whether the index is in step up to `first_event_number - 1`.
        """
        ...

    async def replace(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        sequence_number: int,
        hashes: Mapping[Tier, Sequence[BlockHash]],
    ) -> PublishResult:
        """Put a snapshot, which holds all events up to `sequence_number`, in the place of the worker's index.

        GAP when the index already holds a later event: a late snapshot never deletes what is newer.
        """
        ...

    async def match(self, chains: Mapping[bytes, Sequence[BlockHash]]) -> list[WorkerMatch]:
        """For every live worker, how much it holds of the chain given for its hash root's seed; ordered by id.

        chains: HashRoot.seed -> hashes of the prompt's full blocks, head first.
        """
        ...

    async def reserve(self, *reservations: Reservation) -> None:
        """Count these requests on their workers until a report names them, they expire, or are released."""
        ...

    async def release(self, request_id: RequestId) -> None:
        """Drop the request's reservations on all workers."""
        ...

    async def speculate(
        self,
        worker_id: WorkerId,
        chain: Sequence[BlockHash],
        ttl_ms: int = DEFAULT_SPECULATION_MS,
    ) -> None:
        """Expect the worker's present epoch to hold `chain` on its device soon; match takes the longer of the two."""
        ...

    async def ping(self) -> None:
        """Return when the index answers."""
        ...

    async def close(self) -> None:
        """Give connections back. Idempotent; no call may follow."""
        ...
