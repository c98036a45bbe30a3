"""The store in an LMCache server: what is made up for, and a server that hangs or dies. Skipped without the package."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from kvtransfer.tiers.remote import lmcache_store
from kvtransfer.tiers.remote.lmcache_store import PREFIX, LMCacheStore
from kvtransfer.tiers.remote.reach import FIRST_PAUSE_S
from kvtransfer.tiers.remote.store import Fetch
from kvtransfer.tiers.remote.tier import RemoteTier
from kvtransfer.tiers.remote.value import name_of
from tests.kvtransfer.tiers.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    chain,
    check_all,
    content,
    held,
    key,
    load,
    store,
)
from tests.support.block_stores import Clock, new_prefix, running_lmcache
from tests.support.lmcache_server import IS_INSTALLED, LMCacheServer

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="needs the extra `lmcache`")

NAME = name_of(FINGERPRINT, key(0xABC))
Connect = Callable[[], LMCacheStore]


@pytest.fixture
def server() -> LMCacheServer:
    return running_lmcache()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def connect(server: LMCacheServer, clock: Clock) -> Iterator[Connect]:
    """Stores that share names of their own."""
    prefix = new_prefix()
    made: list[LMCacheStore] = []

    def make() -> LMCacheStore:
        made.append(LMCacheStore(server.url, prefix=prefix, clock_s=clock))
        return made[-1]

    yield make
    for one in made:
        one.close()


def value(text: bytes = b"value") -> list[memoryview]:
    return [memoryview(text)]


def get(shared: LMCacheStore, size: int = 5) -> Fetch:
    return shared.get_into(NAME, [memoryview(bytearray(size))])


def test_a_key_is_our_own_hash_and_no_hash_of_tokens(server: LMCacheServer) -> None:
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.protocol import ClientCommand, ClientMetaMessage, MemoryFormat

    shared = LMCacheStore(server.url)
    shared.put(NAME, value())
    space = f"{PREFIX}{FINGERPRINT.hex()}-0"
    digits = int.from_bytes(key(0xABC).hash, "big")
    asked = CacheEngineKey(space, 1, 0, digits, torch.uint8)
    message = ClientMetaMessage(
        ClientCommand.GET, asked, 0, MemoryFormat.BINARY, torch.uint8, torch.Size([0, 0, 0, 0])
    )
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(message.serialize())
        answer = b""
        while len(answer) < 36 + 5:
            answer += plain.recv(100)
    assert answer[36:] == b"value"
    shared.delete([NAME])
    shared.close()


def test_a_value_whose_put_broke_off_is_not_there_and_may_be_put(
    server: LMCacheServer, connect: Connect
) -> None:
    """The server stores it all the same, says that it is there, and ends the connection of who asks for it."""
    shared = connect()
    conversation = shared._reach._connect()
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(conversation._put(NAME, 0, 5) + b"va")  # type: ignore[attr-defined]
        plain.shutdown(socket.SHUT_WR)
        assert plain.recv(1) == b"", "it has read to the end"
    conversation.close()
    assert shared.count_leading([NAME]) == 0
    assert get(shared) is Fetch.WRONG
    assert shared.counters.failures_total == 0
    assert shared.put(NAME, value())
    assert get(shared) is Fetch.WHOLE
    assert shared.count_leading([NAME]) == 1


def test_a_server_that_hangs_is_away(
    server: LMCacheServer, connect: Connect, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_store, "ANSWER_TIMEOUT_S", 0.3)
    shared = connect()
    shared.put(NAME, value())
    server.pause()
    try:
        assert get(shared) is Fetch.AWAY
        assert get(shared) is Fetch.AWAY
        assert shared.counters.failures_total == 1, "it was asked once"
    finally:
        server.resume()
    monkeypatch.undo()
    clock.now_s += FIRST_PAUSE_S
    assert get(shared) is Fetch.WHOLE, "and no late answer is taken for this one"


def test_workers_share_blocks_and_delete_their_own(connect: Connect) -> None:
    num_bytes = 4 * (BLOCK_BYTES + 56)
    first = RemoteTier(connect(), num_bytes, BLOCK_BYTES, FINGERPRINT, "lru")
    second = RemoteTier(connect(), num_bytes, BLOCK_BYTES, FINGERPRINT, "lru")
    store(first, 1, 2, 3)
    assert second.ask(chain(1, 2, 3, 4)) == 3
    second.note_found(chain(1, 2, 3))
    assert load(second, chain(1, 2, 3)) == [content(key(n)) for n in (1, 2, 3)]
    store(first, 4, 5)
    assert second.ask(chain(1, 2, 3)) == 2
    assert load(second, chain(2, 3)) == [content(key(2)), None]
    assert second.figures()["missing_blocks_total"] == 1
    assert second.counters.damaged_blocks_total == 0
    assert check_all(first, range(10)) == 4
    first.close()
    second.close()


def test_a_server_that_dies_gives_misses_and_works_again(
    server: LMCacheServer, connect: Connect, clock: Clock
) -> None:
    tier = RemoteTier(connect(), 1 << 20, BLOCK_BYTES, FINGERPRINT)
    store(tier, 1, 2, 3)
    reading = tier.prepare_load(chain(1, 2))
    assert reading is not None
    server.kill()
    assert not tier.read(reading[0], memoryview(bytearray(BLOCK_BYTES)))
    assert not tier.read(reading[1], memoryview(bytearray(BLOCK_BYTES)))
    tier.complete_load(reading, reading)
    assert (tier.ask(chain(1)), tier.lookup(chain(3))) == (0, 0)
    assert tier.store.counters.outages_total == 1
    server.start()
    clock.now_s += FIRST_PAUSE_S
    assert tier.ask(chain(1, 2, 3)) == 0
    assert held(tier, range(5)) == [3]
    assert load(tier, chain(3)) == [None]
    store(tier, 1, 2)
    assert check_all(tier, range(5)) == 2
    assert tier.figures()["missing_blocks_total"] == 3
    assert tier.counters.damaged_blocks_total == 0
    tier.close()
