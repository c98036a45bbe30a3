"""What every index promises, held against each back end."""

from __future__ import annotations

import pytest

from core.events import Tier
from core.ids import Epoch, RequestId, WorkerId
from core.worker_info import WorkerInfo, WorkerLoad
from kvindex.base import PrefixIndex, PublishResult, RegisterResult, WorkerMatch
from tests.support.index_backends import Backend
from tests.support.index_values import (
    OTHER_ROOT,
    ROOT,
    cleared,
    create_chain,
    create_reservation,
    create_worker,
    removed,
    stored,
)

LEASE_MS = 60_000
SLACK_MS = 30_000
"""Real time that a busy machine may take between two calls of a test."""


async def join(index: PrefixIndex, worker: WorkerInfo, load: WorkerLoad | None = None) -> None:
    """Make a worker a candidate."""
    assert await index.register(worker, LEASE_MS) is not RegisterResult.SUPERSEDED
    assert await index.heartbeat(worker.id, worker.epoch, load or WorkerLoad(), LEASE_MS)


async def lengths(index: PrefixIndex, chain: list) -> dict[str, tuple[int, int]]:
    found = await index.match({ROOT.seed: chain})
    return {m.worker_id: (m.device_blocks, m.local_blocks) for m in found}


async def match_one(index: PrefixIndex, chain: list) -> WorkerMatch:
    [found] = await index.match({ROOT.seed: chain})
    return found


# ---------------------------------------------------------------- workers and leases


async def test_a_worker_is_listed_with_its_whole_record_and_load(backend: Backend) -> None:
    worker = create_worker()
    load = WorkerLoad(num_running=3, num_waiting=2, num_free_blocks=40, waiting_prefill_tokens=512)
    await join(backend.index, worker, load)
    [state] = await backend.index.workers()
    assert state.info == worker
    assert state.load == load
    assert 0 <= state.age_ms < SLACK_MS


async def test_no_report_no_candidate(backend: Backend) -> None:
    worker = create_worker()
    await backend.index.register(worker, LEASE_MS)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(create_chain(2))])
    assert await backend.index.workers() == []
    assert await backend.index.match({ROOT.seed: create_chain(2)}) == []


async def test_a_lease_that_runs_out_takes_everything_with_it(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(3)
    await backend.index.register(worker, LEASE_MS)
    await backend.index.heartbeat(worker.id, worker.epoch, WorkerLoad(), LEASE_MS)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain)])
    await backend.advance(LEASE_MS)
    assert await backend.index.workers() == []
    assert await backend.index.match({ROOT.seed: chain}) == []
    assert not await backend.index.heartbeat(worker.id, worker.epoch, WorkerLoad(), LEASE_MS)
    result = await backend.index.publish(worker.id, worker.epoch, 2, [stored(chain)])
    assert result is PublishResult.UNKNOWN_WORKER
    assert await backend.index.register(worker, LEASE_MS) is RegisterResult.FRESH
    await backend.index.heartbeat(worker.id, worker.epoch, WorkerLoad(), LEASE_MS)
    assert await lengths(backend.index, chain) == {"w1": (0, 0)}


async def test_heartbeats_keep_worker_and_index_alive(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(3)
    await backend.index.register(worker, LEASE_MS)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain)])
    for _ in range(4):
        assert await backend.index.heartbeat(worker.id, worker.epoch, WorkerLoad(), LEASE_MS)
        await backend.advance(25_000)
    assert await lengths(backend.index, chain) == {"w1": (3, 3)}


async def test_the_age_of_a_report_is_told(backend: Backend) -> None:
    await join(backend.index, create_worker())
    await backend.advance(20_000)
    [state] = await backend.index.workers()
    assert 50 <= state.age_ms < SLACK_MS
    assert (await match_one(backend.index, [])).report.load_age_ms >= 20_000


async def test_registering_again_renews_the_record_and_keeps_the_index(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(2)
    await join(backend.index, worker)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain)])
    assert await backend.index.register(worker, LEASE_MS) is RegisterResult.KEPT
    assert await lengths(backend.index, chain) == {"w1": (2, 2)}
    result = await backend.index.publish(worker.id, worker.epoch, 2, [removed(chain[1:])])
    assert result is PublishResult.APPLIED
    assert await lengths(backend.index, chain) == {"w1": (1, 1)}


async def test_deregistering_forgets_the_worker(backend: Backend) -> None:
    worker, other = create_worker("w1"), create_worker("w2")
    await join(backend.index, worker)
    await join(backend.index, other)
    await backend.index.deregister(worker.id, worker.epoch)
    assert [s.info.id for s in await backend.index.workers()] == ["w2"]
    await backend.index.deregister(other.id, Epoch(5))  # not the holder of the name
    assert [s.info.id for s in await backend.index.workers()] == ["w2"]


async def test_workers_and_matches_are_ordered_by_id(backend: Backend) -> None:
    for name in ["c", "a", "d", "b"]:
        await join(backend.index, create_worker(name))
    assert [s.info.id for s in await backend.index.workers()] == ["a", "b", "c", "d"]
    found = await backend.index.match({ROOT.seed: create_chain(1)})
    assert [m.worker_id for m in found] == ["a", "b", "c", "d"]


# ---------------------------------------------------------------- epochs


async def test_a_new_epoch_starts_with_an_empty_index(backend: Backend) -> None:
    old, new, chain = create_worker(epoch=1), create_worker(epoch=2), create_chain(4)
    await join(backend.index, old)
    await backend.index.publish(old.id, old.epoch, 1, [stored(chain)])
    await backend.index.reserve(create_reservation("r1"))
    assert await backend.index.register(new, LEASE_MS) is RegisterResult.FRESH
    assert await backend.index.workers() == []  # the old one's load says nothing of the new one
    await backend.index.heartbeat(new.id, new.epoch, WorkerLoad(), LEASE_MS)
    found = await match_one(backend.index, chain)
    assert (found.epoch, found.device_blocks, found.local_blocks) == (2, 0, 0)
    assert found.report.num_reservations == 0


async def test_an_old_epoch_can_change_nothing_ever(backend: Backend) -> None:
    old, new, chain = create_worker(epoch=1), create_worker(epoch=2), create_chain(4)
    await join(backend.index, old)
    await join(backend.index, new)
    await backend.index.publish(new.id, new.epoch, 1, [stored(chain[:1])])
    index = backend.index
    assert await index.publish(old.id, old.epoch, 1, [stored(chain)]) is PublishResult.STALE_EPOCH
    snapshot = await index.replace(old.id, old.epoch, 9, {Tier.DEVICE: chain})
    assert snapshot is PublishResult.STALE_EPOCH
    assert not await index.heartbeat(old.id, old.epoch, WorkerLoad(num_running=9), LEASE_MS)
    assert await index.register(old, LEASE_MS) is RegisterResult.SUPERSEDED
    await index.deregister(old.id, old.epoch)
    found = await match_one(index, chain)
    assert (found.epoch, found.device_blocks, found.load.num_running) == (2, 1, 0)


async def test_an_old_epoch_stays_out_when_the_new_ones_lease_has_lapsed(backend: Backend) -> None:
    old, new = create_worker(epoch=1), create_worker(epoch=2)
    await backend.index.register(old, LEASE_MS)
    await backend.index.register(new, LEASE_MS)
    await backend.advance(LEASE_MS)
    assert await backend.index.register(old, LEASE_MS) is RegisterResult.SUPERSEDED
    assert await backend.index.register(new, LEASE_MS) is RegisterResult.FRESH


async def test_epochs_are_compared_in_all_their_63_bits(backend: Backend) -> None:
    worker = create_worker(epoch=2**62 + 1)  # as a double it would equal 2**62
    await join(backend.index, worker)
    result = await backend.index.publish(worker.id, Epoch(2**62), 1, [])
    assert result is PublishResult.STALE_EPOCH
    assert (await match_one(backend.index, [])).epoch == 2**62 + 1


# ---------------------------------------------------------------- events


async def test_both_lengths_follow_the_tiers(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(10)
    await join(backend.index, worker)
    events = [
        stored(chain[:4]),
        stored(chain[:7], Tier.HOST),
        stored(chain[:9], Tier.DISK),
    ]
    await backend.index.publish(worker.id, worker.epoch, 1, events)
    assert await lengths(backend.index, chain) == {"w1": (4, 9)}
    await backend.index.publish(worker.id, worker.epoch, 4, [removed(chain[5:9], Tier.DISK)])
    assert await lengths(backend.index, chain) == {"w1": (4, 7)}
    await backend.index.publish(worker.id, worker.epoch, 5, [removed(chain[1:4])])
    assert await lengths(backend.index, chain) == {"w1": (1, 7)}


async def test_order_inside_a_batch_counts(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(4)
    await join(backend.index, worker)
    events = [stored(chain), removed(chain[2:]), stored(chain[2:3]), removed(chain[1:2], Tier.HOST)]
    await backend.index.publish(worker.id, worker.epoch, 1, events)
    assert await lengths(backend.index, chain) == {"w1": (3, 3)}


async def test_a_remote_store_is_not_indexed(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(4)
    await join(backend.index, worker)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain, Tier.REMOTE)])
    assert await lengths(backend.index, chain) == {"w1": (0, 0)}
    await backend.index.replace(worker.id, worker.epoch, 5, {Tier.REMOTE: chain})
    assert await lengths(backend.index, chain) == {"w1": (0, 0)}


async def test_removing_what_was_never_stored_leaves_the_rest(backend: Backend) -> None:
    worker, chain, strange = create_worker(), create_chain(4), create_chain(2, "strange")
    await join(backend.index, worker)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain)])
    await backend.index.publish(
        worker.id, worker.epoch, 2, [removed([strange[0], chain[3], strange[1]])]
    )
    assert await lengths(backend.index, chain) == {"w1": (3, 3)}


async def test_a_repeated_batch_changes_nothing(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(4)
    await join(backend.index, worker)
    first, second = [stored(chain)], [removed(chain[1:])]
    for number, events in [(1, first), (2, second), (1, first)]:
        result = await backend.index.publish(worker.id, worker.epoch, number, events)
        assert result is PublishResult.APPLIED
    # The late copy of the first brought nothing back, and the numbering stands.
    assert await lengths(backend.index, chain) == {"w1": (1, 1)}
    assert (await match_one(backend.index, chain)).report.last_event_number == 2


async def test_a_batch_that_overlaps_applies_its_new_part(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(6)
    await join(backend.index, worker)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain[:2]), cleared()])
    events = [cleared(), stored(chain[:1]), stored(chain[1:3])]  # event 2 again, then 3 and 4
    assert await backend.index.publish(worker.id, worker.epoch, 2, events) is PublishResult.APPLIED
    assert await lengths(backend.index, chain) == {"w1": (3, 3)}
    assert (await match_one(backend.index, chain)).report.last_event_number == 4


@pytest.mark.parametrize("num_hashes", [1, 499, 500, 501, 5_000])
async def test_large_batches(backend: Backend, num_hashes: int) -> None:
    worker, chain = create_worker(), create_chain(num_hashes)
    await join(backend.index, worker)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain)])
    assert await lengths(backend.index, chain) == {"w1": (num_hashes, num_hashes)}
    await backend.index.publish(worker.id, worker.epoch, 2, [removed(chain[1:])])
    assert await lengths(backend.index, chain) == {"w1": (1, 1)}


# ---------------------------------------------------------------- failure edges


@pytest.mark.failure_edge("index gap / dump / clear / restart")
async def test_a_gap_changes_nothing_and_a_snapshot_ends_it(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(6)
    await join(backend.index, worker)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain[:2])])
    result = await backend.index.publish(worker.id, worker.epoch, 3, [stored(chain[:6])])
    assert result is PublishResult.GAP
    assert await lengths(backend.index, chain) == {"w1": (2, 2)}
    snapshot = {Tier.DEVICE: chain[:3], Tier.HOST: chain[:5]}
    assert (
        await backend.index.replace(worker.id, worker.epoch, 3, snapshot) is PublishResult.APPLIED
    )
    assert await lengths(backend.index, chain) == {"w1": (3, 5)}
    # The snapshot carries its place in the numbering, so the next event follows and no second gap is seen.
    result = await backend.index.publish(worker.id, worker.epoch, 4, [stored(chain[3:4])])
    assert result is PublishResult.APPLIED
    assert await lengths(backend.index, chain) == {"w1": (4, 5)}


@pytest.mark.failure_edge("index gap / dump / clear / restart")
async def test_a_late_snapshot_never_deletes_what_is_newer(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(4)
    await join(backend.index, worker)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain[:1]), stored(chain[1:4])])
    result = await backend.index.replace(worker.id, worker.epoch, 1, {Tier.DEVICE: chain[:1]})
    assert result is PublishResult.GAP
    assert await lengths(backend.index, chain) == {"w1": (4, 4)}
    # The same place again is no loss.
    result = await backend.index.replace(worker.id, worker.epoch, 2, {Tier.DEVICE: chain})
    assert result is PublishResult.APPLIED


@pytest.mark.failure_edge("index gap / dump / clear / restart")
@pytest.mark.public_case("B36")
async def test_a_clear_empties_the_worker_and_the_numbers_go_on(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(4)
    await join(backend.index, worker)
    await backend.index.publish(
        worker.id, worker.epoch, 1, [stored(chain), stored(chain, Tier.HOST)]
    )
    await backend.index.publish(worker.id, worker.epoch, 3, [cleared()])
    assert await lengths(backend.index, chain) == {"w1": (0, 0)}
    await backend.index.publish(worker.id, worker.epoch, 4, [stored(chain[:2])])
    assert await lengths(backend.index, chain) == {"w1": (2, 2)}


@pytest.mark.failure_edge("index gap / dump / clear / restart")
async def test_a_clear_of_one_tier_leaves_the_others(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(4)
    await join(backend.index, worker)
    await backend.index.publish(
        worker.id, worker.epoch, 1, [stored(chain), stored(chain[:3], Tier.HOST)]
    )
    await backend.index.publish(
        worker.id, worker.epoch, 3, [cleared(Tier.DEVICE), stored(chain[:1])]
    )
    assert await lengths(backend.index, chain) == {"w1": (1, 3)}
    await backend.index.publish(worker.id, worker.epoch, 5, [cleared(Tier.DEVICE)])
    await backend.index.publish(worker.id, worker.epoch, 6, [cleared(Tier.HOST)])
    assert await lengths(backend.index, chain) == {"w1": (0, 0)}


@pytest.mark.failure_edge("index gap / dump / clear / restart")
@pytest.mark.public_case("B36")
async def test_a_restart_purges_at_once_and_joins_from_its_first_event(backend: Backend) -> None:
    old, new, chain = create_worker(epoch=1), create_worker(epoch=2), create_chain(4)
    await join(backend.index, old)
    await backend.index.publish(old.id, old.epoch, 1, [stored(chain)])
    await join(backend.index, new)
    assert await lengths(backend.index, chain) == {"w1": (0, 0)}
    # The numbering of the new epoch is its own: 2 does not follow the old one's 1.
    result = await backend.index.publish(new.id, new.epoch, 2, [stored(chain)])
    assert result is PublishResult.GAP
    assert (
        await backend.index.publish(new.id, new.epoch, 1, [stored(chain[:2])])
        is PublishResult.APPLIED
    )
    assert await lengths(backend.index, chain) == {"w1": (2, 2)}


@pytest.mark.failure_edge("no events arriving at all")
async def test_a_silent_worker_is_told_apart_and_matched_by_prediction(backend: Backend) -> None:
    silent, telling, chain = create_worker("silent"), create_worker("telling"), create_chain(4)
    await join(backend.index, silent)
    await join(backend.index, telling)
    await backend.index.publish(telling.id, telling.epoch, 1, [])
    await backend.index.speculate(silent.id, chain[:3], ttl_ms=120_000)
    await backend.advance(20_000)
    found = {m.worker_id: m for m in await backend.index.match({ROOT.seed: chain})}
    assert found[silent.id].report.last_event_number is None
    assert found[silent.id].report.index_age_ms is None
    assert found[silent.id].device_blocks == 3
    assert found[telling.id].report.last_event_number == 0
    age_ms = found[telling.id].report.index_age_ms
    assert age_ms is not None
    assert 20_000 <= age_ms < 20_000 + SLACK_MS
    states = {s.info.id: s.report for s in await backend.index.workers()}
    assert states[silent.id].last_event_number is None


async def test_an_empty_batch_asks_whether_the_index_is_in_step(backend: Backend) -> None:
    worker = create_worker()
    await join(backend.index, worker)
    assert await backend.index.publish(worker.id, worker.epoch, 3, []) is PublishResult.GAP
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(create_chain(1))] * 2)
    assert await backend.index.publish(worker.id, worker.epoch, 3, []) is PublishResult.APPLIED
    assert await backend.index.publish(worker.id, worker.epoch, 4, []) is PublishResult.GAP


# ---------------------------------------------------------------- match


async def test_each_worker_is_matched_by_its_own_root(backend: Backend) -> None:
    chain, other_chain = create_chain(3), create_chain(5, "other")
    ours, theirs = create_worker("ours"), create_worker("theirs", root=OTHER_ROOT)
    for worker, held in [(ours, chain), (theirs, other_chain)]:
        await join(backend.index, worker)
        await backend.index.publish(worker.id, worker.epoch, 1, [stored(held)])
    found = await backend.index.match({ROOT.seed: chain, OTHER_ROOT.seed: other_chain})
    assert [(m.device_blocks, m.is_chain_known) for m in found] == [(3, True), (5, True)]
    found = await backend.index.match({ROOT.seed: chain})
    assert [(m.device_blocks, m.is_chain_known) for m in found] == [(3, True), (0, False)]


async def test_a_prompt_shorter_than_a_block_still_finds_the_loads(backend: Backend) -> None:
    await join(backend.index, create_worker(), WorkerLoad(num_running=2))
    found = await match_one(backend.index, [])
    assert (found.device_blocks, found.local_blocks, found.load.num_running) == (0, 0, 2)
    [found] = await backend.index.match({})
    assert not found.is_chain_known


async def test_what_is_held_beyond_the_prompt_does_not_count(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(9)
    await join(backend.index, worker)
    await backend.index.publish(worker.id, worker.epoch, 1, [stored(chain)])
    for length in range(10):
        assert await lengths(backend.index, chain[:length]) == {"w1": (length, length)}


# ---------------------------------------------------------------- speculative entries


async def test_match_takes_the_longer_of_index_and_expectation(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(8)
    await join(backend.index, worker)
    await backend.index.publish(
        worker.id, worker.epoch, 1, [stored(chain[:2]), stored(chain[:6], Tier.HOST)]
    )
    await backend.index.speculate(worker.id, chain[:4], ttl_ms=120_000)
    assert await lengths(backend.index, chain) == {"w1": (4, 6)}
    await backend.index.speculate(worker.id, [*chain[:7], *create_chain(3, "fork")], ttl_ms=120_000)
    assert await lengths(backend.index, chain) == {"w1": (7, 7)}
    assert await lengths(backend.index, chain[:3]) == {"w1": (3, 3)}
    assert await lengths(backend.index, create_chain(4, "strange")) == {"w1": (0, 0)}


async def test_an_expectation_ends(backend: Backend) -> None:
    worker, chain = create_worker(), create_chain(4)
    await join(backend.index, worker)
    await backend.index.speculate(worker.id, chain, ttl_ms=40_000)
    assert await lengths(backend.index, chain) == {"w1": (4, 4)}
    await backend.advance(40_000)
    assert await lengths(backend.index, chain) == {"w1": (0, 0)}


async def test_an_expectation_is_of_one_worker_and_epoch(backend: Backend) -> None:
    chain = create_chain(4)
    for worker in [create_worker("w1"), create_worker("w2")]:
        await join(backend.index, worker)
    await backend.index.speculate(WorkerId("w1"), chain, ttl_ms=120_000)
    await backend.index.speculate(WorkerId("nobody"), chain, ttl_ms=120_000)
    assert await lengths(backend.index, chain) == {"w1": (4, 4), "w2": (0, 0)}
    await join(backend.index, create_worker("w1", epoch=9))
    assert await lengths(backend.index, chain) == {"w1": (0, 0), "w2": (0, 0)}


# ---------------------------------------------------------------- reservations


async def test_reservations_are_summed_until_named_by_a_report(backend: Backend) -> None:
    worker = create_worker()
    await join(backend.index, worker)
    await backend.index.reserve(
        create_reservation("r1", num_tokens=100), create_reservation("r2", num_tokens=50)
    )
    await backend.index.reserve(create_reservation("r2", num_tokens=30))  # replaces, never adds
    report = (await match_one(backend.index, [])).report
    assert (report.reserved_tokens, report.num_reservations) == (130, 2)
    load = WorkerLoad(num_running=1, named_request_ids=("r1", "unheard of"))
    await backend.index.heartbeat(worker.id, worker.epoch, load, LEASE_MS)
    [state] = await backend.index.workers()
    assert (state.report.reserved_tokens, state.report.num_reservations) == (30, 1)
    assert state.load.named_request_ids == ()


async def test_reservations_end_by_themselves(backend: Backend) -> None:
    await join(backend.index, create_worker())
    await backend.index.reserve(
        create_reservation("short", expiry_ms=40_000, num_tokens=1),
        create_reservation("long", num_tokens=2),
    )
    await backend.advance(40_000)
    assert (await match_one(backend.index, [])).report.reserved_tokens == 2


async def test_a_request_is_released_on_all_workers(backend: Backend) -> None:
    for name in ["w1", "w2", "w3"]:
        await join(backend.index, create_worker(name))
    await backend.index.reserve(
        create_reservation("r1", "w1"),
        create_reservation("r1", "w2"),
        create_reservation("r2", "w2"),
    )
    await backend.index.release(RequestId("r1"))
    await backend.index.release(RequestId("unheard of"))
    counts = [s.report.num_reservations for s in await backend.index.workers()]
    assert counts == [0, 1, 0]


async def test_a_reservation_on_an_unknown_worker_is_dropped(backend: Backend) -> None:
    await backend.index.reserve(create_reservation("r1", "nobody"))
    await join(backend.index, create_worker("nobody"))
    assert (await match_one(backend.index, [])).report.num_reservations == 0


async def test_calls_without_work_are_fine(backend: Backend) -> None:
    await backend.index.reserve()
    await backend.index.speculate(WorkerId("w1"), [])
    await backend.index.ping()
    assert await backend.index.workers() == []
    assert await backend.index.match({}) == []
