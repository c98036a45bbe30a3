"""Several tiers as one: the nearest gives, side by side they take the longest, and what does not pay is left."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from core.events import EventKind
from core.events import Tier as TierName
from kvtransfer.tiers.base import BlockKey, TierChange
from kvtransfer.tiers.connector import KVConnector, Segment
from kvtransfer.tiers.mover import AskDone, LoadDone, StoreDone, TierEvent
from tests.kvtransfer.tiers.harness import BLOCK_BYTES, Buffers, chain, content, make_tier, store

HOST, DISK = TierName.HOST, TierName.DISK


class Engine:
    """A connector over a host and a disk tier, and the engine thread's part in it."""

    def __init__(self, folder: Path, **options: float) -> None:
        self.host, self.disk = make_tier("host", folder, 8), make_tier("disk", folder, 8)
        self.events: queue.SimpleQueue[TierEvent] = queue.SimpleQueue()
        self.connector = KVConnector(
            {HOST: self.host, DISK: self.disk}, self.events.put, 4 * BLOCK_BYTES, **options
        )

    def take(self) -> TierEvent:
        event = self.events.get(timeout=20)
        if isinstance(event, LoadDone):
            self.connector.load_done(event)
        elif isinstance(event, StoreDone):
            self.connector.store_done(event)
        else:
            self.connector.ask_done(event)
        return event

    def store(self, name: TierName, *numbers: int) -> list[BlockKey]:
        placements = self.connector.plan_store(name, chain(*numbers))
        if placements:
            blocks = [memoryview(content(placement.key)) for placement in placements]
            self.connector.store(name, self.connector.new_job(), placements, blocks)
            self.take()
        return [placement.key for placement in placements]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path, initial_rates={HOST: 1e6, DISK: 1e5})
    yield engine
    engine.connector.close()


def segments(*parts: tuple[TierName, int, Sequence[int]]) -> list[Segment]:
    return [Segment(name, first, tuple(chain(*numbers))) for name, first, numbers in parts]


def test_each_block_comes_from_the_nearest_that_has_it(engine: Engine) -> None:
    store(engine.host, 1, 2, 6)
    store(engine.disk, 1, 2, 3, 4, 5)
    assert engine.connector.find(chain(1, 2, 3, 4, 6, 7, 1)) == segments(
        (HOST, 0, [1, 2]), (DISK, 2, [3, 4]), (HOST, 4, [6])
    )
    assert engine.connector.find(chain(9, 1)) == []
    assert engine.connector.has(HOST, chain(6)[0])
    assert not engine.connector.has(DISK, chain(6)[0])


def test_tiers_read_side_by_side_and_behind_what_they_read_already(engine: Engine) -> None:
    found = segments((HOST, 0, [1, 2]), (DISK, 2, [3]), (HOST, 3, [4]))
    assert engine.connector.predict_s(found) == pytest.approx(BLOCK_BYTES / 1e5)
    assert engine.connector.predict_s(found[:1]) == pytest.approx(2 * BLOCK_BYTES / 1e6)
    engine.connector._levels[HOST].num_loading_blocks = 20
    assert engine.connector.predict_s(found) == pytest.approx(23 * BLOCK_BYTES / 1e6)
    assert engine.connector.predict_s([]) == 0.0


@pytest.mark.parametrize(
    ("compute_s_a_block", "num_taken"),
    [
        (0.0005, 0),  # half of what the host takes
        (0.002, 1),  # the disk's 10 ms are more than its block is worth
        (0.02, 3),
    ],
)
def test_the_head_that_saves_most_is_taken(
    compute_s_a_block: float, num_taken: int, engine: Engine
) -> None:
    found = segments((HOST, 0, [1, 2]), (DISK, 2, [3]), (HOST, 3, [4]))
    assert engine.connector.worthwhile(found, compute_s_a_block) == found[:num_taken]


def test_a_slow_part_is_taken_for_what_lies_behind_it(engine: Engine) -> None:
    found = segments((DISK, 0, [1]), (HOST, 1, [2, 3, 4, 5]))
    assert engine.connector.worthwhile(found, 0.003) == found  # 15 ms computed, 10 ms loaded


def test_a_load_ends_both_halves_and_tells_the_rate(engine: Engine) -> None:
    store(engine.host, 1, 2, 3)
    (found,) = engine.connector.find(chain(1, 2, 3))
    targets = Buffers(3)
    engine.connector.load(5, found, targets)
    assert engine.connector.num_loading_blocks == 3
    event = engine.take()
    assert isinstance(event, LoadDone)
    assert (event.job, event.tier, event.damaged) == (5, HOST, ())
    assert targets.buffers == [content(key) for key in chain(1, 2, 3)]
    assert engine.connector.num_loading_blocks == 0
    assert engine.host.counters.loaded_blocks_total == 3
    assert engine.connector.seconds(HOST).load_seconds_total == event.seconds
    mean = 0.5 * event.seconds / (3 * BLOCK_BYTES) + 0.5 / 1e6
    assert engine.connector.bytes_per_s(HOST) == pytest.approx(1 / mean)


def test_a_store_takes_what_is_lacking_only(engine: Engine) -> None:
    assert engine.store(HOST, 1, 2) == chain(1, 2)
    assert engine.store(HOST, 1, 2, 3) == chain(3)
    assert engine.store(HOST, 1, 2, 3) == []
    assert engine.connector.room(HOST) == 4
    assert engine.connector.seconds(HOST).store_seconds_total > 0
    assert engine.connector.num_waiting_blocks(HOST) == 0


def test_changes_are_told_by_tier_and_a_clear_empties_all(engine: Engine) -> None:
    engine.store(HOST, 1, 2)
    engine.store(DISK, 1)
    assert engine.connector.take_changes() == {
        HOST: [TierChange(EventKind.STORED, tuple(chain(1, 2)))],
        DISK: [TierChange(EventKind.STORED, tuple(chain(1)))],
    }
    assert engine.connector.held() == {HOST: chain(1, 2), DISK: chain(1)}
    engine.connector.clear()
    assert set(engine.connector.take_changes()) == {HOST, DISK}
    assert engine.connector.held() == {HOST: [], DISK: []}
    assert engine.connector.take_changes() == {}


def test_a_shared_tier_is_asked_and_what_it_has_is_noted_but_not_told(engine: Engine) -> None:
    noted: list[BlockKey] = []
    engine.disk.is_shared = True
    engine.disk.ask = lambda asked: 2  # type: ignore[method-assign]
    engine.disk.note_found = noted.extend  # type: ignore[method-assign,assignment]
    assert engine.connector.has_shared
    engine.connector.ask(9, chain(1, 2, 3))
    assert engine.take() == AskDone(DISK, 9, tuple(chain(1, 2, 3)), 2)
    assert noted == chain(1, 2)
    engine.store(DISK, 5)
    assert engine.connector.take_changes() == {}
    assert engine.connector.held() == {HOST: []}
    engine.connector.clear()
    assert not engine.connector.has(
        DISK, chain(5)[0]
    )  # forgotten; what is shared is not erased by it


def test_a_tier_that_was_slow_long_ago_is_read_once_again(engine: Engine) -> None:
    store(engine.host, 1, 2)
    found = engine.connector.find(chain(1, 2))
    engine.connector.look_again(found)
    assert engine.connector.num_loading_blocks == 0  # its rate is fresh
    engine.connector._levels[HOST].rate._noted_at -= 60.0
    engine.connector.look_again(found)
    engine.connector.look_again(found)  # once is enough
    event = engine.take()
    assert isinstance(event, LoadDone)
    assert [placement.key for placement in event.placements] == chain(1)
    assert engine.events.empty()
    engine.connector.look_again(found)
    assert engine.connector.num_loading_blocks == 0


def test_a_limit_is_what_is_predicted(tmp_path: Path) -> None:
    engine = Engine(tmp_path, load_rate=2000.0, initial_rates={HOST: 1e9})
    try:
        assert engine.connector.bytes_per_s(HOST) == 2000.0
        assert engine.connector.bytes_per_s(DISK) == 2000.0
    finally:
        engine.connector.close()


def test_without_tiers_nothing_is_found() -> None:
    connector = KVConnector({}, lambda event: None, 1)
    connector.touch(chain(1))
    assert connector.find(chain(1)) == []
    assert (connector.names, connector.has_shared, connector.take_changes()) == ([], False, {})
    connector.close()
