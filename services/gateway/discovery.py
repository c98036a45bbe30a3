"""Which workers there are: from the index, from seed addresses, and from what their streams say.

Owns the connections, one a worker. A worker can be routed to while its stream is open, its model bundle is here, and it
shows life:

- the index is away, or the worker never had a lease there (a seed): the open stream is life enough;
- otherwise its lease runs, or its stream brought something within `silence_limit_ms`.

Index away: the last known workers and the seeds go on; what changed meanwhile is caught up with the first poll that
succeeds. A worker that has had neither lease nor stream for a while is forgotten; its seed address finds it again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from core.errors import ServeError
from core.ids import WorkerId
from core.worker_info import WorkerInfo
from kvindex.base import IndexUnavailable, PrefixIndex, WorkerReport, WorkerState
from services.gateway.config import GatewayConfig, check_address
from services.gateway.legs.connection import GatewayIdentity, WorkerConnection
from services.gateway.models import BundleStore, ServedModel, fetch_record
from services.rpc.record_codec import decode_record

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 5.0
_MAINTAIN_INTERVAL_MS = 500
_FORGET_AFTER_S = 10.0


@dataclass(slots=True)
class _Known:
    """One worker. last_leased_poll: number of the last poll that showed its lease, 0 for never."""

    connection: WorkerConnection
    last_leased_poll: int = 0
    report: WorkerReport | None = None


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker that can be routed to. report: the index's last word on it, None when it has none."""

    info: WorkerInfo
    connection: WorkerConnection
    report: WorkerReport | None


class WorkerDirectory:
    """All workers this gateway knows, and the models they serve."""

    def __init__(
        self, config: GatewayConfig, index: PrefixIndex | None, identity: GatewayIdentity
    ) -> None:
        self.bundles = BundleStore()
        self.index_is_connected = False
        self._config = config
        self._index = index
        self._identity = identity
        self._known: dict[WorkerId, _Known] = {}
        self._seed_owner: dict[str, WorkerId] = {}
        self._num_polls = 0
        self._polled_at = 0.0
        self._first_seen_s: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look for workers."""
        if self._index is not None:
            self._tasks.append(_repeat(self._poll_index, self._config.poll_interval_ms))
        if self._config.seeds:
            self._tasks.append(_repeat(self._probe_seeds, self._config.seed_interval_ms))
        self._tasks.append(_repeat(self._maintain, _MAINTAIN_INTERVAL_MS))

    async def close(self) -> None:
        """Stop looking and close every stream."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(known.connection.close() for known in self._known.values()))
        await self.bundles.close()

    # ------------------------------------------------------------ questions

    def connection(self, worker_id: WorkerId) -> WorkerConnection | None:
        """The stream to a worker, if it is known."""
        known = self._known.get(worker_id)
        return None if known is None else known.connection

    def live_workers(self) -> list[LiveWorker]:
        """Workers that can be routed to, by id."""
        found = []
        for worker_id in sorted(self._known):
            known = self._known[worker_id]
            info = known.connection.info
            if info is not None and self._is_live(known) and self.bundles.get(_digest(info)):
                found.append(LiveWorker(info, known.connection, known.report))
        return found

    def known_workers(self) -> list[tuple[WorkerId, bool, WorkerInfo | None, int]]:
        """Every known worker: id, whether it can be routed to, record, requests on its stream."""
        live = {worker.info.id for worker in self.live_workers()}
        return [
            (i, i in live, known.connection.info, known.connection.num_requests)
            for i, known in sorted(self._known.items())
        ]

    def models(self) -> dict[str, ServedModel]:
        """Models that some live worker serves, by name: by worker id, then in the worker's own order."""
        found: dict[str, ServedModel] = {}
        for worker in self.live_workers():
            digest = _digest(worker.info)
            text = self.bundles.get(digest)
            assert text is not None
            for name in worker.info.models:
                earlier = found.get(name)
                if earlier is not None and earlier.bundle_digest != digest:
                    continue
                longest = max(worker.info.max_model_len, earlier.max_model_len if earlier else 0)
                created_s = self._first_seen_s.setdefault(name, int(time.time()))
                found[name] = ServedModel(name, digest, text, longest, created_s)
        return found

    def was_served(self, name: str) -> bool:
        """Whether a model of this name was ever seen."""
        return name in self._first_seen_s

    # ------------------------------------------------------------ the index

    async def _poll_index(self) -> None:
        assert self._index is not None
        try:
            states = await self._index.workers()
        except IndexUnavailable as error:
            self._note_index(False, str(error))
            return
        self._note_index(True)
        self._num_polls += 1
        for state in states:
            self._learn_lease(state)
        self._give_up_silent()

    def _learn_lease(self, state: WorkerState) -> None:
        info = state.info
        known = self._known.get(info.id)
        if known is None:
            known = self._add(info.id, info.control_address)
        elif not known.connection.is_ready and known.connection.address != info.control_address:
            self._move(known, info.control_address)
        known.last_leased_poll = self._num_polls
        known.report = state.report

    def _give_up_silent(self) -> None:
        """Requests that wait on a worker which shows no life go elsewhere."""
        for known in self._known.values():
            if known.last_leased_poll != self._num_polls:
                known.report = None
                if known.connection.is_ready and not self._is_live(known):
                    known.connection.fail_requests("its lease ran out and it is silent")

    def _note_index(self, is_connected: bool, reason: str = "") -> None:
        if is_connected != self.index_is_connected:
            self.index_is_connected = is_connected
            logger.log(
                logging.INFO if is_connected else logging.WARNING,
                "index %s %s",
                "connected" if is_connected else "away, serving from local view:",
                reason,
            )

    # ------------------------------------------------------------ seeds

    async def _probe_seeds(self) -> None:
        addresses = await self._resolved_seeds()
        missing = [address for address in addresses if not self._is_held(address)]
        await asyncio.gather(*(self._probe(address) for address in missing))

    def _is_held(self, seed_address: str) -> bool:
        worker_id = self._seed_owner.get(seed_address)
        known = None if worker_id is None else self._known.get(worker_id)
        return known is not None and known.connection.is_ready

    async def _probe(self, address: str) -> None:
        """Ask a seed who it is, and connect to it unless its worker is connected already."""
        try:
            info = decode_record(await fetch_record(address, _PROBE_TIMEOUT_S))
        except ServeError as error:
            logger.debug("seed %s: %s", address, error)
            return
        self._seed_owner[address] = info.id
        known = self._known.get(info.id)
        if known is None:
            self._add(info.id, address)
        elif not known.connection.is_ready and known.connection.address != address:
            self._move(known, address)

    async def _resolved_seeds(self) -> list[str]:
        groups = await asyncio.gather(*(_resolve(seed) for seed in self._config.seeds))
        return sorted({address for group in groups for address in group})

    # ------------------------------------------------------------ connections

    async def _maintain(self) -> None:
        """Fetch bundles that are missing, and forget workers of whom nothing is left."""
        for worker_id, known in list(self._known.items()):
            connection = known.connection
            if connection.is_ready and connection.info is not None:
                self.bundles.want(_digest(connection.info), connection.address)
            elif connection.down_s() > _FORGET_AFTER_S and not self._may_come_back(known):
                del self._known[worker_id]
                await connection.close()

    def _may_come_back(self, known: _Known) -> bool:
        """Whether the index still names the worker, or cannot be asked. A seed is found again by its address."""
        if self._index is None:
            return False
        return not self.index_is_connected or known.last_leased_poll == self._num_polls

    def _add(self, worker_id: WorkerId, address: str) -> _Known:
        known = _Known(WorkerConnection(address, self._identity, self._connection_changed))
        self._known[worker_id] = known
        return known

    def _move(self, known: _Known, address: str) -> None:
        """The worker came back under another address."""
        old = known.connection
        known.connection = WorkerConnection(address, self._identity, self._connection_changed)
        known.last_leased_poll = 0
        closing = asyncio.create_task(old.close())
        self._tasks.append(closing)
        closing.add_done_callback(self._tasks.remove)

    def _connection_changed(self, connection: WorkerConnection) -> None:
        info = connection.info
        if connection.is_ready and info is not None:
            logger.info("worker %s (%s) at %s", info.id, info.role, connection.address)
            self.bundles.want(_digest(info), connection.address)

    def _is_live(self, known: _Known) -> bool:
        connection = known.connection
        if not connection.is_ready:
            return False
        if not self.index_is_connected or not known.last_leased_poll:
            return True
        if known.last_leased_poll == self._num_polls:
            return True
        silence_s = time.monotonic() - connection.heard_at
        return silence_s * 1000 <= self._config.silence_limit_ms


def _digest(info: WorkerInfo) -> str:
    return info.model_bundle_digest


async def _resolve(seed: str) -> list[str]:
    """The addresses behind a seed; the seed itself where its host is an address already."""
    host, port = check_address("seed", seed)
    if host.startswith("[") or host.replace(".", "").isdigit():
        return [seed]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.debug("seed %s: %s", seed, error)
        return []
    addresses = {(family, str(entry[0])) for family, _, _, _, entry in found}
    return [
        f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"
        for family, ip in addresses
    ]


def _repeat(work: Callable[[], Awaitable[None]], interval_ms: int) -> asyncio.Task[None]:
    """Run `work` every `interval_ms`, for ever; a mistake in it is logged and does not end it."""

    async def loop() -> None:
        while True:
            try:
                await work()
            except Exception:
                logger.exception("a round of %s failed", getattr(work, "__name__", work))
            await asyncio.sleep(interval_ms / 1000)

    return asyncio.create_task(loop())
