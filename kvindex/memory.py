"""The index in one process: the smallest true implementation, for tests and single-process use.

Keeps plain dictionaries, walks chains, reads an injected clock. Nothing is shared with other processes, and no call
ever raises IndexUnavailable. All methods run without a suspension point, so each is atomic in its event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.block_hash import BlockHash
from core.events import CacheEvent, EventKind, Tier
from core.ids import Epoch, RequestId, WorkerId
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.base import (
    DEFAULT_SPECULATION_MS,
    LOCAL_TIERS,
    IndexCounters,
    PublishResult,
    RegisterResult,
    Reservation,
    WorkerMatch,
    WorkerReport,
    WorkerState,
)


def _monotonic_ms() -> float:
    return time.monotonic() * 1000


@dataclass(slots=True)
class _Speculation:
    chain: tuple[BlockHash, ...]
    expires_at_ms: float


@dataclass(slots=True)
class _Entry:
    """All that is kept of one worker#epoch."""

    info: WorkerInfo
    lease_ends_at_ms: float
    load: WorkerLoad | None = None
    load_at_ms: float = 0.0
    last_event_number: int | None = None
    in_step_at_ms: float = 0.0
    tiers: dict[Tier, set[BlockHash]] = field(default_factory=dict)
    reservations: dict[RequestId, tuple[int, float]] = field(default_factory=dict)
    speculations: dict[BlockHash, _Speculation] = field(default_factory=dict)


class MemoryIndex:
    """PrefixIndex over dictionaries. clock_ms: any clock that never runs backwards, in milliseconds."""

    def __init__(self, clock_ms: Callable[[], float] = _monotonic_ms) -> None:
        self._clock_ms = clock_ms
        self._entries: dict[WorkerId, _Entry] = {}
        self._epochs: dict[
            WorkerId, list[Epoch]
        ] = {}  # every epoch that held the name, newest last
        self._counters = IndexCounters()

    @property
    def counters(self) -> IndexCounters:
        """What was ignored or failed so far."""
        return self._counters

    async def register(self, info: WorkerInfo, lease_ms: int) -> RegisterResult:
        """See PrefixIndex.register."""
        epochs = self._epochs.setdefault(info.id, [])
        if info.epoch in epochs[:-1]:
            return RegisterResult.SUPERSEDED
        if info.epoch not in epochs:
            epochs.append(info.epoch)
        lease_ends_at_ms = self._clock_ms() + lease_ms
        entry = self._live(info.id)
        if entry is not None and entry.info.epoch == info.epoch:
            entry.info, entry.lease_ends_at_ms = info, lease_ends_at_ms
            return RegisterResult.KEPT
        self._entries[info.id] = _Entry(info, lease_ends_at_ms)
        return RegisterResult.FRESH

    async def heartbeat(
        self, worker_id: WorkerId, epoch: Epoch, load: WorkerLoad, lease_ms: int
    ) -> bool:
        """See PrefixIndex.heartbeat."""
        entry = self._live(worker_id)
        if entry is None or entry.info.epoch != epoch:
            return False
        entry.load, entry.load_at_ms = replace(load, named_request_ids=()), self._clock_ms()
        entry.lease_ends_at_ms = entry.load_at_ms + lease_ms
        for request_id in load.named_request_ids:
            entry.reservations.pop(RequestId(request_id), None)
        return True

    async def deregister(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """See PrefixIndex.deregister."""
        entry = self._entries.get(worker_id)
        if entry is not None and entry.info.epoch == epoch:
            del self._entries[worker_id]

    async def workers(self) -> list[WorkerState]:
        """See PrefixIndex.workers."""
        return [WorkerState(e.info, report) for e, report in self._candidates()]

    async def publish(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        first_event_number: int,
        events: Sequence[CacheEvent],
    ) -> PublishResult:
        """See PrefixIndex.publish."""
        entry = self._live(worker_id)
        if entry is None or entry.info.epoch != epoch:
            return _refusal(entry)
        last_event_number = entry.last_event_number or 0
        if first_event_number > last_event_number + 1:
            return PublishResult.GAP
        for event in events[last_event_number + 1 - first_event_number :]:
            _apply(entry.tiers, event)
        last_of_batch = first_event_number + len(events) - 1
        entry.last_event_number = max(last_event_number, last_of_batch)
        entry.in_step_at_ms = self._clock_ms()
        return PublishResult.APPLIED

    async def replace(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        sequence_number: int,
        hashes: Mapping[Tier, Sequence[BlockHash]],
    ) -> PublishResult:
        """See PrefixIndex.replace."""
        entry = self._live(worker_id)
        if entry is None or entry.info.epoch != epoch:
            return _refusal(entry)
        if sequence_number < (entry.last_event_number or 0):
            return PublishResult.GAP
        entry.tiers = {tier: set(held) for tier, held in hashes.items() if tier in LOCAL_TIERS}
        entry.last_event_number = sequence_number
        entry.in_step_at_ms = self._clock_ms()
        return PublishResult.APPLIED

    async def match(self, chains: Mapping[bytes, Sequence[BlockHash]]) -> list[WorkerMatch]:
        """See PrefixIndex.match."""
        return [self._match(chains, entry, report) for entry, report in self._candidates()]

    async def reserve(self, *reservations: Reservation) -> None:
        """See PrefixIndex.reserve."""
        for r in reservations:
            entry = self._live(r.worker_id)
            if entry is not None:
                expires_at_ms = self._clock_ms() + r.expiry_ms
                entry.reservations[r.request_id] = (r.num_tokens, expires_at_ms)

    async def release(self, request_id: RequestId) -> None:
        """See PrefixIndex.release."""
        for entry in self._entries.values():
            entry.reservations.pop(request_id, None)

    async def speculate(
        self,
        worker_id: WorkerId,
        chain: Sequence[BlockHash],
        ttl_ms: int = DEFAULT_SPECULATION_MS,
    ) -> None:
        """See PrefixIndex.speculate."""
        entry = self._live(worker_id)
        if entry is not None and chain:
            entry.speculations[chain[-1]] = _Speculation(tuple(chain), self._clock_ms() + ttl_ms)

    async def ping(self) -> None:
        """See PrefixIndex.ping."""

    async def close(self) -> None:
        """See PrefixIndex.close."""

    def _live(self, worker_id: WorkerId) -> _Entry | None:
        """The worker's entry; one whose lease ran out is dropped here, with all that belongs to it."""
        entry = self._entries.get(worker_id)
        if entry is not None and entry.lease_ends_at_ms <= self._clock_ms():
            del self._entries[worker_id]
            return None
        return entry

    def _candidates(self) -> list[tuple[_Entry, WorkerReport]]:
        live = [self._live(worker_id) for worker_id in sorted(self._entries)]
        return [(e, self._report(e, e.load)) for e in live if e is not None and e.load is not None]

    def _report(self, entry: _Entry, load: WorkerLoad) -> WorkerReport:
        now_ms = self._clock_ms()
        _drop_expired(entry, now_ms)
        is_in_step = entry.last_event_number is not None
        return WorkerReport(
            load=load,
            load_age_ms=int(now_ms - entry.load_at_ms),
            reserved_tokens=sum(tokens for tokens, _ in entry.reservations.values()),
            num_reservations=len(entry.reservations),
            last_event_number=entry.last_event_number,
            index_age_ms=int(now_ms - entry.in_step_at_ms) if is_in_step else None,
        )

    def _match(
        self, chains: Mapping[bytes, Sequence[BlockHash]], entry: _Entry, report: WorkerReport
    ) -> WorkerMatch:
        chain = chains.get(entry.info.hash_root.seed)
        asked = chain if chain is not None else ()
        device = entry.tiers.get(Tier.DEVICE, set())
        local = set().union(*entry.tiers.values())
        expected = _longest_common_prefix(asked, entry.speculations.values())
        return WorkerMatch(
            worker_id=entry.info.id,
            epoch=entry.info.epoch,
            device_blocks=max(expected, _walk(asked, device)),
            local_blocks=max(expected, _walk(asked, local)),
            is_chain_known=chain is not None,
            report=report,
        )


def _refusal(entry: _Entry | None) -> PublishResult:
    return PublishResult.UNKNOWN_WORKER if entry is None else PublishResult.STALE_EPOCH


def _apply(tiers: dict[Tier, set[BlockHash]], event: CacheEvent) -> None:
    changed = LOCAL_TIERS if event.tier is None else (event.tier,)
    for tier in changed:
        if tier not in LOCAL_TIERS:
            continue
        held = tiers.setdefault(tier, set())
        if event.kind is EventKind.STORED:
            held.update(event.hashes)
        elif event.kind is EventKind.REMOVED:
            held.difference_update(event.hashes)
        else:
            held.clear()


def _drop_expired(entry: _Entry, now_ms: float) -> None:
    for request_id in [r for r, (_, end) in entry.reservations.items() if end <= now_ms]:
        del entry.reservations[request_id]
    for tail in [t for t, s in entry.speculations.items() if s.expires_at_ms <= now_ms]:
        del entry.speculations[tail]


def _walk(chain: Sequence[BlockHash], held: set[BlockHash]) -> int:
    for position, block_hash in enumerate(chain):
        if block_hash not in held:
            return position
    return len(chain)


def _longest_common_prefix(chain: Sequence[BlockHash], speculations: Iterable[_Speculation]) -> int:
    return max((_common_length(chain, s.chain) for s in speculations), default=0)


def _common_length(chain: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    for position, (ours, theirs) in enumerate(zip(chain, other, strict=False)):
        if ours != theirs:
            return position
    return min(len(chain), len(other))
