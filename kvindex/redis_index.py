"""The index in Redis (7 or newer, Valkey): what all gateways and workers of a cluster share.

Owns the schema's Python half: names of shards, packing of arguments, reading of answers. The other half, and the list
of keys, is in `lua/prelude.lua`. One hash for each worker#epoch maps block hash -> tiers: index and reverse set in
one, so death and clear are one UNLINK. Every method is one server-side call a shard; shards are asked in parallel.
Leases are keys that expire by the server's clock. Never decides anything from what is missing: a worker without lease
or report is not listed.

Memory, as MEMORY USAGE counts it on Valkey 9.1 (`make bench-index`): a block costs 38 to 52 bytes, so a worker of
100,000 blocks takes 4 MB of the server. (A server with the default `hash-max-listpack-entries` of 512 keeps smaller
indexes as lists, 21 bytes a block and slower to publish to; 64 is better.)
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec

from core.block_hash import BlockHash
from core.errors import ServeError
from core.events import CacheEvent, Tier
from core.ids import Epoch, RequestId, WorkerId
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.base import (
    DEFAULT_SPECULATION_MS,
    IndexCounters,
    PublishResult,
    RegisterResult,
    Reservation,
    WorkerMatch,
    WorkerReport,
    WorkerState,
)
from kvindex.codec import (
    SCHEMA_VERSION,
    UnknownSchema,
    decode_worker_info,
    decode_worker_load,
    encode_worker_info,
    encode_worker_load,
)
from kvindex.config import IndexConfig
from kvindex.net_effect import TIER_BITS, net_effect
from kvindex.redis_connection import Argument, RedisConnection

_STAGING_EXPIRY_MS = 30_000
_NEIGHBOUR_VERSIONS = (SCHEMA_VERSION - 1, SCHEMA_VERSION + 1)


class RedisIndex:
    """PrefixIndex over one Redis-compatible server."""

    def __init__(self, config: IndexConfig) -> None:
        self._config = config
        self._counters = IndexCounters()
        self._connection = RedisConnection(config, self._counters)

    @property
    def counters(self) -> IndexCounters:
        """What was ignored or failed so far."""
        return self._counters

    @property
    def is_up(self) -> bool | None:
        """Whether the last call succeeded; None before the first."""
        return self._connection.is_up

    async def register(self, info: WorkerInfo, lease_ms: int) -> RegisterResult:
        """See PrefixIndex.register."""
        record, root = encode_worker_info(info), info.hash_root.seed
        answer = await self._on_shard_of(
            info.id, "register", [info.id, str(info.epoch), record, root, lease_ms]
        )
        return RegisterResult(answer.decode())

    async def heartbeat(
        self, worker_id: WorkerId, epoch: Epoch, load: WorkerLoad, lease_ms: int
    ) -> bool:
        """See PrefixIndex.heartbeat."""
        record = encode_worker_load(replace(load, named_request_ids=()))
        head: list[Argument] = [worker_id, str(epoch), record, lease_ms]
        answer = await self._on_shard_of(worker_id, "heartbeat", [*head, *load.named_request_ids])
        return bool(answer)

    async def deregister(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """See PrefixIndex.deregister."""
        await self._on_shard_of(worker_id, "deregister", [worker_id, str(epoch)])

    async def workers(self) -> list[WorkerState]:
        """See PrefixIndex.workers."""
        states: list[WorkerState | None] = []
        for ignored, *rows in await self._on_all_shards("workers", self._neighbour_registries):
            self._counters.unknown_schema_total += ignored
            states += [self._read_state(row) for row in rows]
        return sorted((s for s in states if s is not None), key=lambda state: state.info.id)

    async def publish(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        first_event_number: int,
        events: Sequence[CacheEvent],
    ) -> PublishResult:
        """See PrefixIndex.publish."""
        effect = net_effect(events)
        arguments: list[Argument] = [worker_id, str(epoch), first_event_number, len(events)]
        arguments.append(effect.cleared)
        for (set_bits, dropped), hashes in effect.groups.items():
            arguments += [set_bits, dropped, b"".join(hashes)]
        answer = await self._on_shard_of(worker_id, "publish", arguments)
        return PublishResult(answer.decode())

    async def replace(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        sequence_number: int,
        hashes: Mapping[Tier, Sequence[BlockHash]],
    ) -> PublishResult:
        """See PrefixIndex.replace.

        The snapshot goes in pieces to a key that nobody reads, and takes the index's place in one act: no piece holds
        the server up for long, and no reader sees half a snapshot.
        """
        held = _tiers_of_blocks(hashes)
        prefix = self._prefix(self._shard(worker_id))
        staging = f"{prefix}staging:{worker_id}#{epoch}:{secrets.token_hex(8)}"
        for piece in _pieces(held, self._config.max_batch_hashes):
            arguments: list[Argument] = [staging, _STAGING_EXPIRY_MS]
            for bits, block_hashes in piece.items():
                arguments += [bits, b"".join(block_hashes)]
            await self._on_shard_of(worker_id, "stage", arguments)
        all_bits = 0
        for bits in held.values():
            all_bits |= bits
        head: list[Argument] = [worker_id, str(epoch), sequence_number]
        answer = await self._on_shard_of(
            worker_id, "replace", [*head, staging, len(held), all_bits]
        )
        return PublishResult(answer.decode())

    async def match(self, chains: Mapping[bytes, Sequence[BlockHash]]) -> list[WorkerMatch]:
        """See PrefixIndex.match."""
        arguments: list[Argument] = []
        for seed, chain in chains.items():
            arguments += [seed, b"".join(chain)]
        answers = await self._on_all_shards("match", lambda shard: arguments)
        rows = [row for packed in answers for row in _match_rows.decode(packed)]
        matches = [self._read_match(row) for row in rows]
        return sorted((m for m in matches if m is not None), key=lambda match: match.worker_id)

    async def reserve(self, *reservations: Reservation) -> None:
        """See PrefixIndex.reserve."""
        by_shard: dict[int, list[Argument]] = {}
        for r in reservations:
            record: list[Argument] = [r.worker_id, r.request_id, r.expiry_ms, r.num_tokens]
            by_shard.setdefault(self._shard(r.worker_id), []).extend(
                [*record, str(r.gateway_epoch)]
            )
        await asyncio.gather(
            *(self._run("reserve", shard, arguments) for shard, arguments in by_shard.items())
        )

    async def release(self, request_id: RequestId) -> None:
        """See PrefixIndex.release."""
        await self._on_all_shards("release", lambda shard: [request_id])

    async def speculate(
        self,
        worker_id: WorkerId,
        chain: Sequence[BlockHash],
        ttl_ms: int = DEFAULT_SPECULATION_MS,
    ) -> None:
        """See PrefixIndex.speculate."""
        if chain:
            await self._on_shard_of(worker_id, "speculate", [worker_id, b"".join(chain), ttl_ms])

    async def ping(self) -> None:
        """See PrefixIndex.ping."""
        await self._connection.ping()

    async def close(self) -> None:
        """See PrefixIndex.close."""
        await self._connection.close()

    def _shard(self, worker_id: WorkerId) -> int:
        digest = hashlib.sha256(worker_id.encode()).digest()
        return int.from_bytes(digest[:8], "little") % self._config.index_shards

    def _prefix(self, shard: int, version: int = SCHEMA_VERSION) -> str:
        return f"{self._config.key_prefix}:{version}:{{{shard}}}:"

    def _neighbour_registries(self, shard: int) -> Sequence[Argument]:
        return [self._prefix(shard, version) + "workers" for version in _NEIGHBOUR_VERSIONS]

    async def _run(self, name: str, shard: int, arguments: Sequence[Argument]) -> Any:
        return await self._connection.run(name, self._prefix(shard) + "workers", arguments)

    async def _on_shard_of(
        self, worker_id: WorkerId, name: str, arguments: Sequence[Argument]
    ) -> Any:
        return await self._run(name, self._shard(worker_id), arguments)

    async def _on_all_shards(
        self, name: str, arguments_of: Callable[[int], Sequence[Argument]]
    ) -> list[Any]:
        shards = range(self._config.index_shards)
        return await asyncio.gather(*(self._run(name, s, arguments_of(s)) for s in shards))

    def _read_state(self, row: list[Any]) -> WorkerState | None:
        _, _, load_record, *numbers, record = row
        try:
            return WorkerState(decode_worker_info(record), _read_report(load_record, *numbers))
        except ServeError as error:
            self._count_ignored(error)
            return None

    def _read_match(self, row: _MatchRow) -> WorkerMatch | None:
        worker_id, epoch, load_record, *numbers, device_blocks, local_blocks, is_chain_known = row
        try:
            report = _read_report(load_record, *numbers)
        except ServeError as error:
            self._count_ignored(error)
            return None
        return WorkerMatch(
            WorkerId(worker_id),
            Epoch(int(epoch)),
            device_blocks,
            local_blocks,
            bool(is_chain_known),
            report,
        )

    def _count_ignored(self, error: ServeError) -> None:
        if isinstance(error, UnknownSchema):
            self._counters.unknown_schema_total += 1
        else:
            self._counters.undecodable_total += 1


_MatchRow = tuple[str, str, str, int, int, int, int, int, int, int, int]
"""A row of `lua/match.lua`: id, epoch, load record, the five numbers of a report, both lengths, chain known."""

_match_rows = msgspec.msgpack.Decoder(list[_MatchRow])


def _read_report(
    load_record: bytes | str,
    load_age_ms: int,
    reserved_tokens: int,
    num_reservations: int,
    last_event: int,
    index_age: int,
) -> WorkerReport:
    """The report in a row, as `lua/reports.lua` writes it. Raises UnknownSchema or UndecodableRecord."""
    return WorkerReport(
        decode_worker_load(load_record),
        load_age_ms,
        reserved_tokens,
        num_reservations,
        None if last_event < 0 else last_event,
        None if index_age < 0 else index_age,
    )


def _tiers_of_blocks(hashes: Mapping[Tier, Sequence[BlockHash]]) -> dict[BlockHash, int]:
    held: dict[BlockHash, int] = {}
    for tier, bits in TIER_BITS.items():
        for block_hash in hashes.get(tier, ()):
            held[block_hash] = held.get(block_hash, 0) | bits
    return held


def _pieces(held: Mapping[BlockHash, int], max_hashes: int) -> Iterator[dict[int, list[BlockHash]]]:
    """The blocks of a snapshot in pieces of at most `max_hashes`, each as tier bits -> hashes."""
    items = iter(held.items())
    while chunk := list(islice(items, max_hashes)):
        piece: dict[int, list[BlockHash]] = {}
        for block_hash, bits in chunk:
            piece.setdefault(bits, []).append(block_hash)
        yield piece
