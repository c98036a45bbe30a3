"""A tier's mover: loads first, stores behind, a bound on what waits, and an answer for everything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.tiers.base import Placement, Tier
from kvtransfer.tiers.mover import LoadDone, StoreDone, TierMover
from tests.kvtransfer.tiers.harness import (
    BLOCK_BYTES,
    KINDS,
    chain,
    content,
    damage,
    held,
    key,
    make_tier,
    store,
)


class Gate:
    """Holds a tier's writes until it is opened for so many, and tells the order of what was done."""

    def __init__(self, tier: Tier) -> None:
        self.order: list[tuple[str, int]] = []
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        write, read = tier.write, tier.read

        def gated_write(placement: Placement, block: memoryview) -> None:
            self.entered.release()
            self.permits.acquire()
            self.order.append(("write", int.from_bytes(placement.key.hash, "little")))
            write(placement, block)

        def noted_read(placement: Placement, block: memoryview) -> bool:
            self.order.append(("read", int.from_bytes(placement.key.hash, "little")))
            return read(placement, block)

        tier.write, tier.read = gated_write, noted_read  # type: ignore[method-assign]


class Engine:
    """The engine thread's side: an inbox, and the second half of every pair."""

    def __init__(self, tier: Tier, max_waiting_blocks: int = 100) -> None:
        self.tier = tier
        self.inbox: list[LoadDone | StoreDone] = []
        self.arrived = threading.Semaphore(0)
        self.mover = TierMover(tier, self.post, max_waiting_blocks * tier.block_bytes)

    def post(self, done: LoadDone | StoreDone) -> None:
        self.inbox.append(done)
        self.arrived.release()

    def take(self) -> LoadDone | StoreDone:
        """Wait for the next answer and complete its pair."""
        assert self.arrived.acquire(timeout=20)
        done = self.inbox.pop(0)
        if isinstance(done, LoadDone):
            self.tier.complete_load(done.placements, done.damaged)
        else:
            self.tier.complete_store(done.placements, done.ok)
        return done

    def store(self, *numbers: int) -> tuple[Placement, ...]:
        plan = self.tier.prepare_store(chain(*numbers))
        assert plan is not None
        blocks = [memoryview(content(placement.key)) for placement in plan.placements]
        self.mover.store(plan.placements, blocks)
        return plan.placements

    def load(self, *numbers: int) -> list[bytearray]:
        placements = self.tier.prepare_load(chain(*numbers))
        assert placements is not None
        buffers = [bytearray(BLOCK_BYTES) for _ in placements]
        self.mover.load(placements, [memoryview(buffer) for buffer in buffers])
        return buffers


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(make_tier(request.param, tmp_path, 8), max_waiting_blocks=4)
    yield engine
    engine.mover.stop()
    engine.tier.close()


def test_blocks_go_out_and_come_back(engine: Engine) -> None:
    placements = engine.store(1, 2, 3)
    assert engine.tier.lookup(chain(1)) == 0
    assert engine.take() == StoreDone(placements, True)
    buffers = engine.load(3, 1)
    done = engine.take()
    assert isinstance(done, LoadDone)
    assert (done.damaged, done.was_read) == ((), True)
    assert buffers == [content(key(3)), content(key(1))]


def test_a_damaged_block_is_named_and_the_others_are_read(engine: Engine, tmp_path: Path) -> None:
    plan = store(engine.tier, 1, 2)
    damage(engine.tier, plan.placements[0], tmp_path)
    buffers = engine.load(1, 2)
    done = engine.take()
    assert isinstance(done, LoadDone)
    assert [placement.key for placement in done.damaged] == chain(1)
    assert buffers[1] == content(key(2))
    assert held(engine.tier, [1, 2]) == [2]


def test_a_load_comes_between_two_blocks_of_a_store(engine: Engine) -> None:
    store(engine.tier, 1)
    gate = Gate(engine.tier)
    engine.store(2, 3)
    assert gate.entered.acquire(timeout=20)
    engine.load(1)
    gate.permits.release(2)
    assert isinstance(engine.take(), LoadDone)
    assert isinstance(engine.take(), StoreDone)
    assert gate.order == [("write", 2), ("read", 1), ("write", 3)]


def test_what_waits_is_bounded(engine: Engine) -> None:
    gate = Gate(engine.tier)
    engine.store(1, 2, 3)
    assert engine.mover.has_room(1)
    assert not engine.mover.has_room(2)
    with pytest.raises(AssertionError, match="more is stored than may wait"):
        engine.mover.store([Placement(key(9), 7)] * 2, [memoryview(content(key(9)))] * 2)
    gate.permits.release(3)
    engine.take()
    assert engine.mover.has_room(4)


def test_a_write_that_fails_fails_the_rest_of_its_store_only(engine: Engine) -> None:
    write = engine.tier.write

    def failing(placement: Placement, block: memoryview) -> None:
        if placement.key == key(2):
            raise OSError(28, "No space left on device")
        write(placement, block)

    engine.tier.write = failing  # type: ignore[method-assign]
    placements = engine.store(1, 2, 3)
    assert engine.take() == StoreDone(placements[:1], True)
    assert engine.take() == StoreDone(placements[1:], False)
    engine.store(4)
    engine.take()
    assert held(engine.tier, range(6)) == [1, 4]
    assert engine.mover.has_room(4)


def test_what_is_left_at_the_end_is_answered_and_nothing_is_dropped(engine: Engine) -> None:
    store(engine.tier, 1)
    gate = Gate(engine.tier)
    first = engine.store(2, 3)
    assert gate.entered.acquire(timeout=20)
    second = engine.store(4)
    engine.load(1)
    stopping = threading.Thread(target=engine.mover.stop)
    stopping.start()
    while not engine.mover._is_stopped:
        pass
    gate.permits.release()
    stopping.join(20)
    answers = [engine.take() for _ in range(4)]
    assert StoreDone(first[:1], True) in answers
    assert StoreDone(first[1:], False) in answers
    assert StoreDone(second, False) in answers
    (load,) = [answer for answer in answers if isinstance(answer, LoadDone)]
    assert (load.was_read, load.damaged) == (False, ())
    assert held(engine.tier, range(6)) == [1, 2]
    assert engine.tier.counters.damaged_blocks_total == 0
    with pytest.raises(AssertionError, match="stopped"):
        engine.load(1)
