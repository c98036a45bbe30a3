"""From a request to a route: asks index and ledger, picks, and counts what was picked at once.

Owns the reservations of this gateway. A call to the index that fails costs cache hits, never the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.block_hash import BlockHash, HashRoot, hash_chain
from core.ids import Epoch, RequestId, WorkerId
from core.request import Request
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.base import IndexUnavailable, PrefixIndex, Reservation, WorkerMatch
from services.gateway.config import GatewayConfig
from services.gateway.discovery import LiveWorker, WorkerDirectory
from services.gateway.metrics import GatewayMetrics
from services.gateway.routing.base import Candidate, Route, RouteQuery
from services.gateway.routing.ledger import LedgerEntry, RouteLedger
from services.gateway.routing.picker import Picker

logger = logging.getLogger(__name__)

_RESERVATION_EXPIRY_MS = 60_000
_MANY_TOKENS = 65_536
"""Hashing more than this takes long enough to be done in a thread."""

Chains = dict[bytes, list[BlockHash]]


class RoutedRequest:
    """A route with the counts it holds; ended exactly once by its request."""

    def __init__(
        self,
        route: Route,
        entries: Sequence[LedgerEntry],
        ledger: RouteLedger,
        release: Callable[[], None],
    ) -> None:
        self.route = route
        self._entries = tuple(entries)
        self._ledger = ledger
        self._release: Callable[[], None] | None = release

    def prompt_computed(self) -> None:
        """The first token is here: nobody has to compute this prompt any more. Idempotent."""
        owner, *others = self._entries
        self._ledger.tokens_computed(owner)
        for entry in others:
            self._ledger.drop(entry)

    def end(self) -> None:
        """Give the counts back. Idempotent."""
        for entry in self._entries:
            self._ledger.drop(entry)
        release, self._release = self._release, None
        if release is not None:
            release()


class Router:
    """Chooses workers for requests."""

    def __init__(
        self,
        config: GatewayConfig,
        index: PrefixIndex | None,
        directory: WorkerDirectory,
        metrics: GatewayMetrics,
        epoch: Epoch,
    ) -> None:
        self.ledger = RouteLedger()
        self._index = index
        self._directory = directory
        self._metrics = metrics
        self._epoch = epoch
        self._picker = Picker(config.routing)
        self._background: set[asyncio.Task[None]] = set()

    async def route(
        self, request: Request, bundle_digest: str, excluded: Iterable[WorkerId] = ()
    ) -> RoutedRequest:
        """The route of a request, counted from now on; the picker's errors say why there is none."""
        started = time.perf_counter()
        sampling = request.sampling
        query = RouteQuery(
            model=request.model,
            bundle_digest=bundle_digest,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=sampling.max_tokens,
            num_choices=sampling.n,
        )
        out = frozenset(excluded)
        workers = [worker for worker in self._directory.live_workers() if worker.info.id not in out]
        # An index that is away is not even asked: the directory notices when it is back.
        index = self._index if self._directory.index_is_connected else None
        chains = {} if index is None else await _chains(request, workers)
        asked_at = self.ledger.now()
        matches = {} if index is None else await _match(index, chains)
        candidates = [
            self._candidate(worker, matches.get(worker.info.id), query, asked_at)
            for worker in workers
        ]
        route = self._picker.pick(candidates, query)
        if any(request.output_token_ids):  # whoever goes on with a run computes all of it
            route = replace(route, prefill=())
        routed = self._count(request, route, query, chains, index)
        self._metrics.routed(route, query, time.perf_counter() - started)
        return routed

    async def close(self) -> None:
        """Wait for what is on its way to the index."""
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)

    def _candidate(
        self, worker: LiveWorker, match: WorkerMatch | None, query: RouteQuery, asked_at: float
    ) -> Candidate:
        info = worker.info
        num_requests, queued_tokens = self._load(worker, match, asked_at)
        on_device = anywhere = 0
        if match is not None and match.epoch == info.epoch:
            on_device = _usable_tokens(match.device_blocks, info, query.num_prompt_tokens)
            anywhere = _usable_tokens(match.local_blocks, info, query.num_prompt_tokens)
        return Candidate(
            info,
            num_requests,
            queued_tokens,
            device_tokens=on_device,
            tier_tokens=anywhere - on_device,
            last_routed=self.ledger.last_routed(info.id),
        )

    def _load(
        self, worker: LiveWorker, match: WorkerMatch | None, asked_at: float
    ) -> tuple[int, int]:
        """Requests and queued prompt tokens of a worker: its report, and what it does not count yet."""
        worker_id = worker.info.id
        own_requests, own_tokens = self.ledger.counts(worker_id)
        if match is None:
            load = worker.connection.load or WorkerLoad()
            reported = load.num_running + load.num_waiting
            return max(reported, own_requests), max(load.waiting_prefill_tokens, own_tokens)
        report = match.report
        new_requests, new_tokens = self.ledger.counts(worker_id, asked_at)
        requests = report.load.num_running + report.load.num_waiting + report.num_reservations
        tokens = report.load.waiting_prefill_tokens + report.reserved_tokens
        return max(requests + new_requests, own_requests), tokens + new_tokens

    def _count(
        self,
        request: Request,
        route: Route,
        query: RouteQuery,
        chains: Chains,
        index: PrefixIndex | None,
    ) -> RoutedRequest:
        """Enter the choice in the ledger now, and in the index as soon as it answers."""
        counted = [(route.owner, 0 if route.is_split else _lacking(route.owner, query))]
        counted += [(candidate, _lacking(candidate, query)) for candidate in route.prefill[:1]]
        entries = [
            self.ledger.add(request.id, candidate.info.id, tokens) for candidate, tokens in counted
        ]
        self.ledger.note_owner(route.owner.info.id)
        if index is None:
            return RoutedRequest(route, entries, self.ledger, lambda: None)
        reserving = self._spawn(self._reserve(index, entries))
        for candidate, _ in counted:
            chain = chains.get(candidate.info.hash_root.seed)
            if chain:
                self._spawn(index.speculate(candidate.info.id, chain))

        def release() -> None:
            self._spawn(_unreserve(index, request.id, after=reserving))

        return RoutedRequest(route, entries, self.ledger, release)

    async def _reserve(self, index: PrefixIndex, entries: Sequence[LedgerEntry]) -> None:
        await index.reserve(
            *(
                Reservation(
                    e.request_id, e.worker_id, self._epoch, e.num_tokens, _RESERVATION_EXPIRY_MS
                )
                for e in entries
            )
        )
        for entry in entries:
            self.ledger.confirm(entry)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run an index write beside the request; a write that fails is a hint less."""

        async def run() -> None:
            try:
                await work
            except IndexUnavailable as error:
                logger.debug("index write: %s", error)

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _chains(request: Request, workers: Iterable[LiveWorker]) -> Chains:
    """The prompt's hashes for each distinct root among the workers of its model."""
    roots = {
        worker.info.hash_root.seed: worker.info.hash_root
        for worker in workers
        if request.model in worker.info.models
    }
    tokens, salt = request.prompt_token_ids, request.cache_salt
    if len(tokens) * len(roots) < _MANY_TOKENS:
        return _hash_all(roots, tokens, salt)
    return await asyncio.to_thread(_hash_all, roots, tokens, salt)


async def _match(index: PrefixIndex, chains: Chains) -> dict[WorkerId, WorkerMatch]:
    try:
        return {match.worker_id: match for match in await index.match(chains)}
    except IndexUnavailable:
        return {}


async def _unreserve(index: PrefixIndex, request_id: RequestId, after: asyncio.Task[None]) -> None:
    """Release what was reserved; never before the reservation, which would outlive it then."""
    await asyncio.wait([after])
    await index.release(request_id)


def _hash_all(roots: Mapping[bytes, HashRoot], tokens: Sequence[int], salt: str) -> Chains:
    return {seed: hash_chain(root, tokens, salt) for seed, root in roots.items()}


def _lacking(candidate: Candidate, query: RouteQuery) -> int:
    """Tokens that the worker will have to compute: loading keeps no other prompt from being computed."""
    return query.num_prompt_tokens - candidate.cached_tokens


def _usable_tokens(num_held: int, info: WorkerInfo, num_prompt_tokens: int) -> int:
    """Tokens of the prompt that so many hashes stand for: whole blocks of the worker's size, never the last token."""
    held = num_held * info.hash_root.block_size
    block_size = info.layout.block_size
    return min(held, num_prompt_tokens - 1) // block_size * block_size
