"""What is true of the index in Redis beyond the contract: keys, versions, time limits, restarts, a full server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from core.block_hash import BlockHash
from core.errors import ConfigError
from core.events import Tier
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.base import IndexUnavailable, PublishResult
from kvindex.codec import SCHEMA_VERSION
from kvindex.config import IndexConfig
from kvindex.connect import connect_index
from kvindex.memory import MemoryIndex
from kvindex.redis_index import RedisIndex
from services.cluster.valkey import ValkeyServer
from tests.support.index_backends import shift_moments
from tests.support.index_values import (
    ROOT,
    cleared,
    create_chain,
    create_reservation,
    create_worker,
    stored,
)
from tests.support.valkey import command, running_valkey

LEASE_MS = 60_000
CONFIG = IndexConfig(command_timeout_ms=5_000, retry_interval_ms=50)


@asynccontextmanager
async def connected(
    server: ValkeyServer, config: IndexConfig = CONFIG
) -> AsyncIterator[RedisIndex]:
    index = RedisIndex(replace(config, redis_url=server.url))
    try:
        yield index
    finally:
        await index.close()


async def join(index: RedisIndex, worker: WorkerInfo, lease_ms: int = LEASE_MS) -> None:
    await index.register(worker, lease_ms)
    await index.heartbeat(worker.id, worker.epoch, WorkerLoad(), lease_ms)


async def keys_of(server: ValkeyServer, word: str = "") -> list[str]:
    return sorted(key.decode("latin-1") for key in await command(server, "KEYS", f"*{word}*"))


async def device_blocks(index: RedisIndex, chain: list[BlockHash]) -> list[int]:
    return [m.device_blocks for m in await index.match({ROOT.seed: chain})]


# ---------------------------------------------------------------- keys


async def test_every_key_names_schema_and_shard_and_expires(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        worker, chain = create_worker(), create_chain(4)
        await join(index, worker)
        await index.publish(worker.id, worker.epoch, 1, [stored(chain)])
        await index.speculate(worker.id, chain)
        await index.reserve(create_reservation("r1"))
        await index._run("stage", 0, [f"{index._prefix(0)}staging:x", 1_000, 1, b"".join(chain)])
        keys = await keys_of(valkey)
        assert len(keys) == 8
        assert all(key.startswith(f"baton:{SCHEMA_VERSION}:{{0}}:") for key in keys)
        for key in await command(valkey, "KEYS", "*"):
            assert await command(valkey, "PTTL", key) > 0, key


@pytest.mark.public_case("B36")
async def test_no_key_of_a_dead_worker_remains_after_its_lease(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        dead, living, chain = create_worker("dead"), create_worker("living"), create_chain(4)
        await join(index, dead, lease_ms=60_000)
        await join(index, living, lease_ms=240_000)
        await index.publish(dead.id, dead.epoch, 1, [stored(chain)])
        await index.reserve(create_reservation("r1", "dead", expiry_ms=60_000))
        await index.speculate(dead.id, chain, ttl_ms=60_000)
        assert len(await keys_of(valkey, "dead")) == 4
        shift_moments(valkey, 60_000)
        assert await keys_of(valkey, "dead") == []
        await index.heartbeat(living.id, living.epoch, WorkerLoad(), LEASE_MS)
        registry = index._prefix(0) + "workers"
        assert await command(valkey, "ZRANGE", registry, 0, -1) == [b"living"]
        assert await command(valkey, "ZCARD", index._prefix(0) + "speculative") == 0


async def test_a_report_sweeps_reservations_that_ended(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        worker = create_worker()
        await join(index, worker, lease_ms=600_000)
        await index.reserve(
            create_reservation("short", expiry_ms=40_000),
            create_reservation("long", expiry_ms=400_000),
        )
        shift_moments(valkey, 60_000)
        key = index._prefix(0) + "reservations:w1"
        assert await command(valkey, "HLEN", key) == 2
        await index.heartbeat(worker.id, worker.epoch, WorkerLoad(), 600_000)
        assert await command(valkey, "HKEYS", key) == [b"long"]


async def test_a_lease_ends_by_the_clock_of_the_server(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        worker = create_worker()
        await join(index, worker, lease_ms=50)
        async with asyncio.timeout(20):
            while await keys_of(valkey, "w1"):  # noqa: ASYNC110 - a server tells no events
                await asyncio.sleep(0.01)
        assert await index.workers() == []


async def test_a_worker_epoch_is_one_hash_and_a_clear_unlinks_it(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        worker, chain = create_worker(epoch=5), create_chain(4)
        await join(index, worker)
        await index.publish(
            worker.id, worker.epoch, 1, [stored(chain), stored(chain[:1], Tier.HOST)]
        )
        [key] = await keys_of(valkey, "index:")
        assert key == f"baton:{SCHEMA_VERSION}:{{0}}:index:w1#5"
        held = await command(valkey, "HGETALL", key)
        assert held == {chain[0]: b"3", chain[1]: b"1", chain[2]: b"1", chain[3]: b"1"}
        await index.publish(worker.id, worker.epoch, 3, [cleared()])
        assert await keys_of(valkey, "index:") == []


async def test_a_restarted_worker_leaves_no_key_of_its_old_epoch(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        old, new = create_worker(epoch=5), create_worker(epoch=6)
        await join(index, old)
        await index.publish(old.id, old.epoch, 1, [stored(create_chain(4))])
        await index.register(new, LEASE_MS)
        assert await keys_of(valkey, "#5") == []


async def test_shards_split_workers_and_never_prefixes(valkey: ValkeyServer) -> None:
    async with connected(valkey, replace(CONFIG, index_shards=4)) as index:
        chain = create_chain(3)
        for number in range(12):
            worker = create_worker(f"w{number:02d}")
            await join(index, worker)
            await index.publish(worker.id, worker.epoch, 1, [stored(chain)])
        assert await device_blocks(index, chain) == [3] * 12
        registries = await keys_of(valkey, "workers")
        assert len(registries) == 4
        for key in await keys_of(valkey, "worker:"):
            shard = index._shard(create_worker(key.rsplit(":", 1)[1]).id)
            assert f"{{{shard}}}" in key


async def test_scripts_keep_to_the_slot_of_their_shard(held_port: int) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-port", str(held_port))
    with running_valkey(port=0, options=options) as server:
        await command(server, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        async with asyncio.timeout(10):
            while not await is_cluster_up(server):  # noqa: ASYNC110 - a server tells no events
                await asyncio.sleep(0.02)
        async with connected(server, replace(CONFIG, index_shards=3)) as index:
            chain = create_chain(4)
            for number in range(6):
                worker = create_worker(f"w{number}")
                await join(index, worker)
                await index.publish(worker.id, worker.epoch, 1, [stored(chain)])
                await index.replace(worker.id, worker.epoch, 2, {Tier.DEVICE: chain[:2]})
                await index.speculate(worker.id, chain[:3])
                await index.reserve(create_reservation("r1", worker.id))
            assert await device_blocks(index, chain) == [3] * 6
            assert len(await index.workers()) == 6
            await index.release(create_reservation("r1").request_id)


async def is_cluster_up(server: ValkeyServer) -> bool:
    return b"cluster_state:ok" in await command(server, "CLUSTER", "INFO")


async def test_names_are_forgotten_after_a_day_but_not_while_they_live(
    valkey: ValkeyServer,
) -> None:
    async with connected(valkey) as index:
        epochs = index._prefix(0) + "epochs"
        await join(index, create_worker("living"))
        for name in ["living", "gone"]:
            await command(valkey, "HSET", epochs, name, "1000 7 8")  # to be forgotten long ago
        await index.register(create_worker("new"), LEASE_MS)
        assert sorted(await command(valkey, "HKEYS", epochs)) == [b"living", b"new"]


# ---------------------------------------------------------------- versions


async def test_records_of_another_version_are_ignored_and_counted(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        await join(index, create_worker("ours"))
        for name, field, content in [
            ("newer", "record", msgspec.msgpack.encode([SCHEMA_VERSION + 1, "new words"])),
            ("broken", "record", b"\xc1"),
            ("newer-load", "load", msgspec.json.encode([SCHEMA_VERSION + 1, 5, 6])),
        ]:
            await join(index, create_worker(name))
            await command(valkey, "HSET", f"{index._prefix(0)}worker:{name}", field, content)
        assert [s.info.id for s in await index.workers()] == ["ours"]
        assert index.counters.unknown_schema_total == 2
        assert index.counters.undecodable_total == 1
        matched = [m.worker_id for m in await index.match({})]
        assert matched == ["broken", "newer", "ours"]  # a match reads no records, only loads
        assert index.counters.unknown_schema_total == 3


async def test_workers_under_keys_of_the_next_version_are_counted(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        await join(index, create_worker("ours"))
        far_future_ms = round(time.time() * 1000) + 60_000
        for member, end in [("theirs", far_future_ms), ("dead", 1_000)]:
            registry = f"baton:{SCHEMA_VERSION + 1}:{{0}}:workers"
            await command(valkey, "ZADD", registry, end, member)
        assert [s.info.id for s in await index.workers()] == ["ours"]
        assert index.counters.unknown_schema_total == 1


# ---------------------------------------------------------------- snapshots


async def test_a_snapshot_goes_in_pieces_and_shows_at_once(valkey: ValkeyServer) -> None:
    async with connected(valkey, replace(CONFIG, max_batch_hashes=700)) as index:
        worker, chain = create_worker(), create_chain(5_000)
        await join(index, worker)
        await index.publish(worker.id, worker.epoch, 1, [stored(create_chain(50, "old"))])
        snapshot = {Tier.DEVICE: chain[:3_000], Tier.DISK: chain}
        result = await index.replace(worker.id, worker.epoch, 9, snapshot)
        assert result is PublishResult.APPLIED
        [found] = await index.match({ROOT.seed: chain})
        assert (found.device_blocks, found.local_blocks) == (3_000, 5_000)
        assert await command(valkey, "HLEN", f"{index._prefix(0)}index:w1#{worker.epoch}") == 5_000
        assert await keys_of(valkey, "staging") == []
        await index.replace(worker.id, worker.epoch, 9, {})
        assert await device_blocks(index, chain) == [0]


async def test_a_snapshot_that_lost_a_piece_is_refused(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        worker, chain = create_worker(), create_chain(4)
        await join(index, worker)
        await index.publish(worker.id, worker.epoch, 1, [stored(chain[:1])])
        staging = f"{index._prefix(0)}staging:x"
        await index._run("stage", 0, [staging, 1_000, 1, b"".join(chain[:3])])
        head = [worker.id, str(worker.epoch), 5, staging]
        assert await index._run("replace", 0, [*head, 4, 1]) == b"gap"
        assert await device_blocks(index, chain) == [1]
        assert await keys_of(valkey, "staging") == []


# ---------------------------------------------------------------- a server in trouble


async def test_a_server_that_forgot_its_scripts_gets_them_again(valkey: ValkeyServer) -> None:
    async with connected(valkey) as index:
        await join(index, create_worker())
        await command(valkey, "SCRIPT", "FLUSH")
        assert len(await index.match({})) == 1
        await command(valkey, "SCRIPT", "FLUSH")
        await asyncio.gather(*(index.match({}) for _ in range(20)))


async def test_an_absent_server_is_one_kind_of_failure() -> None:
    for url in ["redis://127.0.0.1:1", "unix:///nowhere/at/all.sock"]:
        index = RedisIndex(replace(CONFIG, redis_url=url))
        with pytest.raises(IndexUnavailable, match="index: "):
            await index.match({})
        assert index.is_up is False
        assert index.counters.failures_total == 1
        await index.close()


async def test_a_hung_server_costs_one_time_limit_and_then_nothing() -> None:
    config = replace(CONFIG, command_timeout_ms=700, retry_interval_ms=60_000)
    with running_valkey() as server:
        async with connected(server, config) as index:
            await join(index, create_worker())
            server.pause()
            started_s = time.monotonic()
            with pytest.raises(IndexUnavailable, match="no answer within 700 ms"):
                await index.match({})
            assert 0.6 < time.monotonic() - started_s < 10.0
            started_s = time.monotonic()
            for _ in range(100):
                with pytest.raises(IndexUnavailable, match="not asked"):
                    await index.match({})
            assert time.monotonic() - started_s < 30.0  # and not 100 times the limit
            server.resume()
            await index.ping()  # tries at once, whatever failed before
            assert len(await index.match({})) == 1
            assert index.is_up is True


async def test_an_abandoned_call_never_answers_another() -> None:
    """A reply that comes after its caller left must not be read by the next user of the connection."""
    config = replace(CONFIG, max_connections=3, command_timeout_ms=60_000)
    with running_valkey() as server:
        async with connected(server, config) as index:
            worker, chain = create_worker(), create_chain(3)
            await join(index, worker)
            await index.publish(worker.id, worker.epoch, 1, [stored(chain)])
            for round_number in range(12):
                server.pause()
                abandoned = [asyncio.create_task(index.workers()) for _ in range(3)]
                await asyncio.sleep(0.002 * (round_number % 4))
                kept = [asyncio.create_task(device_blocks(index, chain)) for _ in range(3)]
                for call in abandoned:
                    call.cancel()
                await asyncio.wait(abandoned)
                server.resume()
                assert await asyncio.gather(*kept) == [[3]] * 3
                load = WorkerLoad(num_running=round_number)
                assert await index.heartbeat(worker.id, worker.epoch, load, LEASE_MS) is True
                assert [s.load for s in await index.workers()] == [load]


@pytest.mark.failure_edge("index gap / dump / clear / restart")
async def test_a_restarted_server_is_found_again_by_itself() -> None:
    with running_valkey(port=0) as server:
        async with connected(server) as index:
            worker = create_worker()
            await join(index, worker)
            server.kill()
            with pytest.raises(IndexUnavailable):
                await index.match({})
            server.restart()
            await asyncio.sleep(0.06)
            assert await index.match({}) == []
            assert not await index.heartbeat(worker.id, worker.epoch, WorkerLoad(), LEASE_MS)
            await join(index, worker)
            assert len(await index.match({})) == 1


async def test_connections_that_died_idle_do_not_fail_a_call() -> None:
    with running_valkey(port=0) as server:
        async with connected(server) as index:
            await asyncio.gather(*(index.ping() for _ in range(8)))
            server.restart()
            for _ in range(8):
                assert await index.match({}) == []
            assert index.counters.failures_total == 0


async def test_many_calls_share_a_bounded_pool(valkey: ValkeyServer) -> None:
    async with connected(valkey, replace(CONFIG, max_connections=4)) as index:
        await join(index, create_worker())
        answers = await asyncio.gather(*(index.match({}) for _ in range(200)))
        assert all(len(answer) == 1 for answer in answers)
        assert len((await command(valkey, "CLIENT", "LIST")).splitlines()) <= 4 + 1


async def test_a_full_server_refuses_blocks_but_no_worker() -> None:
    with running_valkey() as server:
        async with connected(server) as index:
            greedy, modest, chain = (
                create_worker("greedy"),
                create_worker("modest"),
                create_chain(5),
            )
            await join(index, greedy)
            await join(index, modest)
            await index.publish(modest.id, modest.epoch, 1, [stored(chain)])
            await command(server, "CONFIG", "SET", "maxmemory", "100kb")
            with pytest.raises(IndexUnavailable, match="refused: OutOfMemory"):
                await index.publish(greedy.id, greedy.epoch, 1, [stored(create_chain(2_000))])
            load = WorkerLoad(num_running=7)
            assert await index.heartbeat(modest.id, modest.epoch, load, LEASE_MS)
            await join(index, create_worker("newcomer"))
            await index.reserve(create_reservation("r1", "modest"))
            found = {m.worker_id: m for m in await index.match({ROOT.seed: chain})}
            assert len(found) == 3
            assert found[modest.id].device_blocks == 5
            assert found[modest.id].report.reserved_tokens == 100
            assert found[greedy.id].report.is_silent(60_000)
            assert index.is_up is True


# ---------------------------------------------------------------- which index


async def test_the_config_says_which_index(valkey: ValkeyServer) -> None:
    assert isinstance(connect_index(IndexConfig()), MemoryIndex)
    index = connect_index(IndexConfig(redis_url=valkey.url))
    assert isinstance(index, RedisIndex)
    await index.ping()
    await index.close()


def test_an_unusable_address_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="redis_url: 'http://x' is not usable"):
        RedisIndex(IndexConfig(redis_url="http://x"))
