"""The store in a Redis: what others see of it, how long blocks live, and servers that hang, refuse or die."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
import redis

from core.errors import ConfigError
from core.events import Tier as TierName
from kvtransfer.tiers.base import Placement
from kvtransfer.tiers.mover import LoadDone, StoreDone, TierEvent, TierMover
from kvtransfer.tiers.remote import redis_store
from kvtransfer.tiers.remote.reach import FIRST_PAUSE_S
from kvtransfer.tiers.remote.redis_store import EXPIRY_MS, PREFIX, RedisStore
from kvtransfer.tiers.remote.store import Fetch, StoreAway, StoreRefused
from kvtransfer.tiers.remote.tier import RemoteTier
from services.cluster.valkey import ValkeyServer
from tests.kvtransfer.tiers.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    Buffers,
    chain,
    content,
    key,
    load,
    store,
    valkey,
    write_all,
)
from tests.support.block_stores import Clock
from tests.support.valkey import flush, running_valkey

NAME = f"{'cd' * 16}-0:{'12' * 16}"
KEY = f"{PREFIX}{NAME}"


@pytest.fixture
def server() -> ValkeyServer:
    flush(valkey())
    return valkey()


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def shared(server: ValkeyServer) -> Iterator[RedisStore]:
    shared = RedisStore(server.url)
    yield shared
    shared.close()


def value(text: bytes = b"value") -> list[memoryview]:
    return [memoryview(text)]


def get(shared: RedisStore, size: int = 5) -> Fetch:
    return shared.get_into(NAME, [memoryview(bytearray(size))])


# ---------------------------------------------------------------- what others see


def test_values_have_names_of_their_own_among_others(
    shared: RedisStore, client: redis.Redis
) -> None:
    client.set("somebody:else", b"1")
    client.set(NAME, b"2")
    shared.put(NAME, value())
    assert client.get(KEY) == b"value"
    shared.delete([NAME, "somebody:else"])
    assert sorted(client.keys("*")) == [NAME.encode(), b"somebody:else"]


def test_a_block_expires_a_day_after_its_last_use(shared: RedisStore, client: redis.Redis) -> None:
    shared.put(NAME, value())
    assert EXPIRY_MS - 60_000 < client.pttl(KEY) <= EXPIRY_MS
    for use in (lambda: get(shared), lambda: shared.put(NAME, value())):
        client.pexpire(KEY, 5000)
        use()
        assert EXPIRY_MS - 60_000 < client.pttl(KEY) <= EXPIRY_MS
    client.pexpire(KEY, 5000)
    assert shared.count_leading([NAME]) == 1
    assert client.pttl(KEY) <= 5000, "a question is no use"
    client.pexpire(KEY, 0)
    assert get(shared) is Fetch.ABSENT


def test_a_database_of_its_own() -> None:
    with running_valkey(port=0) as server:
        shared = RedisStore(f"{server.url}/3")
        shared.put(NAME, value())
        with redis.Redis.from_url(server.url, db=3) as client:
            assert client.get(KEY) == b"value"
        assert shared.place == f"redis at 127.0.0.1:{server.port}"
        shared.close()


def test_a_login_is_used_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with running_valkey(port=0, options=()) as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "s3cret")
        address = server.url.partition("://")[2]
        shared = RedisStore(f"redis://:s3cret@{address}")
        assert shared.put(NAME, value())
        shared.close()
        wrong = RedisStore(f"redis://:gue55ed@{address}")
        assert get(wrong) is Fetch.AWAY
        assert wrong.is_away
        wrong.close()
    told = caplog.text + shared.place
    assert "s3cret" not in told
    assert "gue55ed" not in told
    assert f"redis at {address} is away" in told


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis://", "names no host"),
        ("redis://:6379", "names no host"),
        ("unix://", "names no path"),
        ("redis://host:port", "is no address"),
        ("redis://host/first", "'first' is no number of a database"),
        ("redis://host?socket_timeout=soon", "Invalid value"),
        ("redis://host?no_such_option=1", "no_such_option"),
        ("http://host", "is no address"),
    ],
)
def test_an_address_that_is_none_is_refused_by_its_flag(url: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        RedisStore(url)
    assert "--kv-offloading-remote-url" in caught.value.message


@pytest.mark.parametrize(
    "url",
    ["redis://me:s3cret@host/first?password=s3cret", "redis://me:s3cret/x@host"],
)
def test_a_refused_address_does_not_tell_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisStore(url)
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_protocol_is_not_for_an_address_to_choose(server: ValkeyServer, protocol: int) -> None:
    shared = RedisStore(f"{server.url}?protocol={protocol}")
    assert shared.put(NAME, value())
    assert get(shared) is Fetch.WHOLE
    shared.close()


# ---------------------------------------------------------------- servers that fail


def test_a_server_that_hangs_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "ANSWER_TIMEOUT_S", 0.2)
    clock = Clock()
    with running_valkey() as server:
        shared = RedisStore(server.url, clock_s=clock)
        shared.put(NAME, value())
        server.pause()
        assert get(shared) is Fetch.AWAY
        assert get(shared) is Fetch.AWAY
        assert shared.counters.failures_total == 1, "it was asked once"
        server.resume()
        clock.now_s += FIRST_PAUSE_S
        assert get(shared) is Fetch.WHOLE, "and no late answer is taken for this one"
        shared.close()


def test_a_server_that_is_full_refuses_blocks_and_gives_them() -> None:
    options = ("--maxmemory", "8mb")
    with running_valkey(options=options) as server:
        shared = RedisStore(server.url, clock_s=Clock())
        block = memoryview(bytes(1_000_000))

        def fill() -> None:
            for number in range(20):
                shared.put(f"{NAME}{number:02}", [block])

        with pytest.raises(StoreRefused, match="maxmemory"):
            fill()
        assert (shared.is_full, shared.is_away) == (True, False)
        assert shared.counters.refusals_total == 1
        assert shared.count_leading([f"{NAME}00", NAME]) == 1
        assert shared.get_into(f"{NAME}00", [memoryview(bytearray(1_000_000))]) is Fetch.WHOLE
        shared.delete([f"{NAME}00"])
        shared.close()


def test_what_is_no_string_under_a_name_of_ours_is_no_value(
    shared: RedisStore, client: redis.Redis
) -> None:
    client.rpush(KEY, "a list")
    assert get(shared) is Fetch.AWAY
    assert not shared.is_away
    assert not shared.put(NAME, value())
    shared.delete([NAME])
    assert shared.put(NAME, value())
    assert get(shared) is Fetch.WHOLE


def test_a_server_that_dies_in_the_middle_gives_misses_and_works_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mover at work; the server is killed; every job is answered; the server starts again, empty."""
    clock = Clock()
    with running_valkey(port=0) as server:
        tier = RemoteTier(RedisStore(server.url, clock_s=clock), 1 << 20, BLOCK_BYTES, FINGERPRINT)
        done: queue.Queue[TierEvent] = queue.Queue()
        mover = TierMover(TierName.REMOTE, tier, done.put, 100 * BLOCK_BYTES)
        store(tier, 1, 2, 3)
        writing = tier.prepare_store(chain(4, 5))
        reading = tier.prepare_load(chain(1, 2, 3))
        assert writing is not None
        assert reading is not None
        server.kill()
        mover.load(1, reading, Buffers(len(reading)))
        blocks = [memoryview(content(placement.key)) for placement in writing.placements]
        mover.store(2, writing.placements, blocks)
        read, written = done.get(timeout=60), done.get(timeout=60)
        assert isinstance(read, LoadDone)
        assert (read.damaged, read.unread) == (tuple(reading), ())
        assert isinstance(written, StoreDone)
        assert (written.placements, written.ok) == (writing.placements, False)
        tier.complete_load(reading, reading)
        tier.complete_store(writing.placements, ok=False)
        assert tier.prepare_store(chain(6)) is not None
        assert (tier.ask(chain(1, 2)), tier.lookup(chain(1, 2))) == (0, 0)
        assert tier.store.counters.outages_total == 1
        server.restart()
        clock.now_s += FIRST_PAUSE_S
        assert tier.ask(chain(1, 2)) == 0
        store(tier, 1, 2)
        assert load(tier, chain(1, 2)) == [content(key(1)), content(key(2))]
        assert tier.counters.damaged_blocks_total == 0
        mover.stop()
        tier.close()


def test_a_server_that_restarts_empty_makes_held_blocks_missing() -> None:
    with running_valkey() as server:
        tier = RemoteTier(RedisStore(server.url), 1 << 20, BLOCK_BYTES, FINGERPRINT)
        store(tier, 1, 2)
        server.restart()
        assert load(tier, chain(1, 2)) == [None, None]
        assert tier.figures()["missing_blocks_total"] == 2
        assert tier.store.counters.outages_total == 0
        store(tier, 1, 2)
        assert load(tier, chain(1)) == [content(key(1))]
        tier.close()


def test_a_server_that_dies_in_the_middle_of_a_store_leaves_nothing_half() -> None:
    clock = Clock()
    with running_valkey() as server:
        tier = RemoteTier(RedisStore(server.url, clock_s=clock), 1 << 20, BLOCK_BYTES, FINGERPRINT)
        plan = tier.prepare_store(chain(1, 2))
        assert plan is not None
        write_all(tier, plan.placements[:1])
        server.kill()
        with pytest.raises(StoreAway):
            tier.write(Placement(*plan.placements[1]), memoryview(content(key(2))))
        tier.complete_store(plan.placements[:1], ok=True)
        tier.complete_store(plan.placements[1:], ok=False)
        server.restart()
        clock.now_s += FIRST_PAUSE_S
        assert tier.ask(chain(1, 2)) == 0
        assert load(tier, chain(1)) == [None]
        tier.close()
