"""One process's way to a store: connections that are used again, and who tries when it is away."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvtransfer.tiers.remote.reach import FIRST_PAUSE_S, LONGEST_PAUSE_S, Pause
from kvtransfer.tiers.remote.store import Fetch, StoreAway, StoreRefused
from tests.support.block_stores import Clock
from tests.support.memory_store import MemoryServer, MemoryStore


def parts(text: bytes) -> list[memoryview]:
    return [memoryview(text)]


def get(store: MemoryStore) -> Fetch:
    return store.get_into("a:1", [memoryview(bytearray(5))])


def test_a_pause_doubles_until_it_ends() -> None:
    clock = Clock()
    pause = Pause(clock)
    durations_s = []
    assert (pause.is_on, pause.is_over) == (False, False)
    for number in range(8):
        assert pause.begin() is (number == 0)
        start_s = clock.now_s
        while pause.is_on:
            clock.now_s += FIRST_PAUSE_S
        durations_s.append(clock.now_s - start_s)
        assert pause.is_over
    assert durations_s == [0.5, 1, 2, 4, 8, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert pause.end()
    assert not pause.end()
    assert (pause.is_on, pause.is_over) == (False, False)


def test_a_connection_is_used_again() -> None:
    server = MemoryServer()
    store = MemoryStore(server)
    store.put("a:1", parts(b"value"))
    assert [get(store), get(store)] == [Fetch.WHOLE, Fetch.WHOLE]
    assert server.num_connects == 1
    server.max_bytes = 5
    with pytest.raises(StoreRefused):
        store.put("a:2", parts(b"value"))
    assert (get(store), server.num_connects) == (Fetch.WHOLE, 1)


def test_while_one_call_tries_others_do_not_wait_for_it() -> None:
    server, clock = MemoryServer(), Clock()
    store = MemoryStore(server, clock)
    server.is_up = False
    assert get(store) is Fetch.AWAY
    server.is_up = True
    clock.now_s += FIRST_PAUSE_S
    is_trying, may_go_on = threading.Event(), threading.Event()

    def before(call: str) -> None:
        is_trying.set()
        assert may_go_on.wait(20)

    server.before = before
    got: list[Fetch] = []
    trying = threading.Thread(target=lambda: got.append(get(store)))
    trying.start()
    assert is_trying.wait(20)
    assert (get(store), store.is_away, server.num_connects) == (Fetch.AWAY, True, 2)
    may_go_on.set()
    trying.join()
    assert (got, store.is_away) == ([Fetch.ABSENT], False)


def test_a_value_that_may_have_been_added_the_first_time_is_taken_for_added() -> None:
    """The connection died after the server had done it: the second try finds what the first one left."""
    server = MemoryServer()
    store = MemoryStore(server)
    get(store)
    put = server.put

    def put_and_die(name: str, value: bytes) -> bool:
        put(name, value)
        server.put = put  # type: ignore[method-assign]
        raise ConnectionResetError("gone")

    server.put = put_and_die  # type: ignore[method-assign]
    assert store.put("a:1", parts(b"value"))
    assert not store.put("a:1", parts(b"value"))


def test_time_that_runs_out_is_not_waited_for_twice() -> None:
    server = MemoryServer()
    store = MemoryStore(server)
    get(store)
    tries: list[str] = []

    def hang(call: str) -> None:
        tries.append(call)
        raise TimeoutError("no answer")

    server.before = hang
    assert get(store) is Fetch.AWAY
    assert tries == ["get"]


@pytest.mark.parametrize("change", ["put", "delete"])
def test_a_change_that_is_refused_pauses_changes_and_is_said_once(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, clock = MemoryServer(), Clock()
    store = MemoryStore(server, clock)
    store.put("a:1", parts(b"value"))

    def refuse(call: str) -> None:
        if call != "get":
            raise StoreRefused("no leave")

    def change_it(names: Sequence[str] = ("a:2",)) -> None:
        store.put(names[0], parts(b"value")) if change == "put" else store.delete(names)

    server.before = refuse
    for _ in range(3):
        with pytest.raises(StoreRefused):
            change_it()
        assert (store.is_full, store.is_away, get(store)) == (True, False, Fetch.WHOLE)
        clock.now_s += LONGEST_PAUSE_S
        assert not store.is_full
    assert [record.getMessage() for record in caplog.records] == [
        "remote tier: memory takes no blocks: no leave"
    ]
    server.before = lambda call: None
    change_it()
    store.put("a:3", parts(b"value"))
    assert (store.is_full, store.counters.refusals_total) == (False, 3)


def test_a_store_closed_while_a_call_is_under_way_keeps_no_connection() -> None:
    server = MemoryServer()
    store = MemoryStore(server)
    server.before = lambda call: store.close()
    assert get(store) is Fetch.ABSENT
    assert store._reach._idle == []
    with pytest.raises(StoreAway, match="memory is closed"):
        store.put("a:1", parts(b"value"))
