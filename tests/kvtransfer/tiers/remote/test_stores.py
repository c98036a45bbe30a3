"""What every shared store promises (kvtransfer/tiers/remote/store.py), over each of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from kvtransfer.tiers.remote.reach import FIRST_PAUSE_S, LONGEST_PAUSE_S
from kvtransfer.tiers.remote.store import BlockStore, Fetch, StoreAway
from tests.support.block_stores import STORES, StoreServer, store_server


@pytest.fixture(params=STORES)
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    with store_server(request.param) as server:
        yield server


@pytest.fixture
def store(server: StoreServer) -> Iterator[BlockStore]:
    store = server.connect()
    yield store
    store.close()


def name(number: int) -> str:
    return f"{'ab' * 16}-0:{number:032x}"


def names(*numbers: int) -> list[str]:
    return [name(number) for number in numbers]


def parts(*values: bytes) -> list[memoryview]:
    return [memoryview(value) for value in values]


def get(store: BlockStore, number: int, *sizes: int) -> tuple[Fetch, list[bytes]]:
    buffers = [bytearray(size) for size in sizes]
    fetch = store.get_into(name(number), [memoryview(buffer) for buffer in buffers])
    return fetch, [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize("size", [1, 8100, 8192, 100_000, 3_000_001])
def test_what_was_put_is_got(store: BlockStore, size: int) -> None:
    head, body = bytes(range(56)), bytes(i * 7 % 251 for i in range(1000)) * (size // 1000 + 1)
    body = body[:size]
    assert store.put(name(1), parts(head, body))
    assert get(store, 1, 56, size) == (Fetch.WHOLE, [head, body])
    # The parts need not be cut as they were.
    assert get(store, 1, 50, size + 6) == (Fetch.WHOLE, [head[:50], head[50:] + body])


def test_what_is_there_stays(store: BlockStore) -> None:
    assert store.put(name(1), parts(b"head", b"first"))
    assert not store.put(name(1), parts(b"head", b"later"))
    assert get(store, 1, 4, 5) == (Fetch.WHOLE, [b"head", b"first"])


def test_what_is_not_there_is_absent(store: BlockStore) -> None:
    assert get(store, 1, 4)[0] is Fetch.ABSENT
    store.put(name(1), parts(b"head"))
    assert get(store, 2, 4)[0] is Fetch.ABSENT


@pytest.mark.parametrize("size", [3, 5, 200_000])
def test_a_value_of_another_size_is_wrong_and_the_next_call_is_right(
    store: BlockStore, size: int
) -> None:
    store.put(name(1), parts(b"head", b"body" * 10_000))
    store.put(name(2), parts(b"other"))
    assert get(store, 1, 4, size)[0] is Fetch.WRONG
    assert get(store, 2, 5) == (Fetch.WHOLE, [b"other"])


def test_leading_names_are_counted(store: BlockStore) -> None:
    assert store.count_leading([]) == 0
    assert store.count_leading(names(1, 2)) == 0
    for number in (1, 2, 4):
        store.put(name(number), parts(b"value"))
    assert store.count_leading(names(1, 2, 3, 4)) == 2
    assert store.count_leading(names(4, 2, 1)) == 3
    assert store.count_leading(names(3, 1)) == 0


def test_a_long_chain_is_counted_to_its_gap(store: BlockStore) -> None:
    for number in range(1300):
        if number != 1100:
            store.put(name(number), parts(b"v"))
    assert store.count_leading(names(*range(1300))) == 1100
    assert store.count_leading(names(*range(1100))) == 1100


def test_what_is_deleted_is_absent_and_may_be_put_again(store: BlockStore) -> None:
    for number in (1, 2, 3):
        store.put(name(number), parts(b"first"))
    store.delete(names(1, 3, 9))
    store.delete([])
    assert [get(store, number, 5)[0] for number in (1, 2, 3)] == [
        Fetch.ABSENT, Fetch.WHOLE, Fetch.ABSENT,
    ]  # fmt: skip
    assert store.count_leading(names(2, 1)) == 1
    assert store.put(name(1), parts(b"again"))
    assert get(store, 1, 5) == (Fetch.WHOLE, [b"again"])
    assert store.count_leading(names(2, 1)) == 2


def test_workers_meet_in_the_store(server: StoreServer, store: BlockStore) -> None:
    other = server.connect()
    assert store.put(name(1), parts(b"value"))
    assert get(other, 1, 5) == (Fetch.WHOLE, [b"value"])
    assert not other.put(name(1), parts(b"value"))
    other.delete(names(1))
    assert get(store, 1, 5)[0] is Fetch.ABSENT
    other.close()


def test_calls_of_several_threads_do_not_meet(store: BlockStore) -> None:
    wrong: list[int] = []

    def work(worker: int) -> None:
        for number in range(worker, 100, 5):
            value = bytes([number]) * 20_000
            store.put(name(number), parts(value))
            if get(store, number, 20_000) != (Fetch.WHOLE, [value]):
                wrong.append(number)
            if store.count_leading(names(number, 1000)) != 1:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.counters.failures_total == 0


def test_a_store_that_is_away_is_a_miss_and_is_asked_once(
    server: StoreServer, store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(name(1), parts(b"value"))
    server.kill()
    with caplog.at_level(logging.WARNING):
        assert store.count_leading(names(1)) == 0
        assert store.is_away
        assert get(store, 1, 5)[0] is Fetch.AWAY
        with pytest.raises(StoreAway, match="is away"):
            store.put(name(2), parts(b"value"))
        with pytest.raises(StoreAway, match="is away"):
            store.delete(names(1))
    assert (store.counters.failures_total, store.counters.outages_total) == (1, 1)
    assert [record.getMessage()[:12] for record in caplog.records] == ["remote tier:"]


def test_a_store_that_comes_back_is_found_after_a_pause(
    server: StoreServer, store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(name(1), parts(b"value"))
    server.kill()
    assert get(store, 1, 5)[0] is Fetch.AWAY
    server.clock.now_s += FIRST_PAUSE_S
    assert not store.is_away
    assert get(store, 1, 5)[0] is Fetch.AWAY
    assert store.counters.failures_total == 2
    server.restart()
    server.clock.now_s += FIRST_PAUSE_S
    assert store.is_away, "the second pause is longer"
    assert get(store, 1, 5)[0] is Fetch.AWAY
    server.clock.now_s += FIRST_PAUSE_S
    assert get(store, 1, 5)[0] is Fetch.ABSENT
    assert store.put(name(1), parts(b"again"))
    assert get(store, 1, 5) == (Fetch.WHOLE, [b"again"])
    assert (store.counters.failures_total, store.counters.outages_total) == (2, 1)
    assert [record.getMessage().split()[-1] for record in caplog.records] == ["back", "back"]


def test_the_longest_pause_is_bounded(server: StoreServer, store: BlockStore) -> None:
    server.kill()
    for _ in range(12):
        server.clock.now_s += LONGEST_PAUSE_S
        assert store.count_leading(names(1)) == 0
    assert store.counters.failures_total == 12
    server.restart()
    server.clock.now_s += LONGEST_PAUSE_S
    assert store.put(name(1), parts(b"value"))


def test_a_restart_between_two_calls_is_no_outage(server: StoreServer, store: BlockStore) -> None:
    store.put(name(1), parts(b"value"))
    server.kill()
    server.restart()
    assert get(store, 1, 5)[0] is Fetch.ABSENT
    assert store.counters.failures_total == 0


def test_a_store_that_was_never_there_is_away(server: StoreServer) -> None:
    server.kill()
    store = server.connect()
    assert not store.is_away
    assert store.count_leading(names(1)) == 0
    assert store.is_away
    store.close()


def test_a_closed_store_is_away(store: BlockStore) -> None:
    store.put(name(1), parts(b"value"))
    store.close()
    store.close()
    assert get(store, 1, 5)[0] is Fetch.AWAY
    assert store.count_leading(names(1)) == 0
    with pytest.raises(StoreAway, match="is closed"):
        store.put(name(1), parts(b"value"))
    assert store.counters.outages_total == 0
