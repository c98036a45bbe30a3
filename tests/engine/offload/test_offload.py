"""An engine whose pool is small goes on from its tiers as if it were large: same tokens, less computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.events import CacheEvent, EventKind, Tier
from engine.messages import AddRequest, ResetPrefixCache, SnapshotTaken, StepDone, TakeSnapshot
from engine.offload_config import OffloadConfig
from kvtransfer.tiers.base import Placement
from tests.support.engines import (
    EngineHarness,
    Wire,
    abort,
    make_request,
    run_alone,
    turn_until,
)

MIB = 1 / 1024
PROMPTS = {
    name: [(number * (start + 2) + start) % 97 for number in range(100)]
    for start, name in enumerate("abcdef")
}


@contextmanager
def engine(
    num_blocks: int = 16, *, is_staged: bool = False, **offload: Any
) -> Iterator[EngineHarness]:
    """Its pool holds the KV of two prompts and their answers, no more."""
    values = {"size": 4 * MIB} | offload
    harness = EngineHarness(
        num_blocks=num_blocks, is_staged=is_staged, offload=OffloadConfig(**values)
    )
    try:
        yield harness
    finally:
        harness.close()


def run(harness: EngineHarness, name: str, prompt: list[int], **sampling: Any) -> list[int]:
    request = make_request(name, prompt, **sampling)
    harness.inbox.post(AddRequest(request))
    turn_until(lambda: bool(harness.finish_reasons(name)), harness)
    turn_until(harness.is_idle, harness)
    assert set(harness.finish_reasons(name).values()) == {"length"}
    return harness.tokens(name)


def alone(prompt: list[int], **sampling: Any) -> list[int]:
    (tokens,) = run_alone(make_request("alone", prompt, **sampling))
    return tokens


@pytest.mark.parametrize("is_staged", [False, True], ids=["one memory", "staged"])
def test_what_the_pool_lost_comes_back_from_the_host(is_staged: bool) -> None:
    with engine(is_staged=is_staged) as harness:
        for name, prompt in PROMPTS.items():
            assert run(harness, name, prompt) == alone(prompt)
        computed = harness.stats.computed_prompt_tokens_total
        assert run(harness, "again", PROMPTS["a"]) == alone(PROMPTS["a"])
        assert harness.stats.computed_prompt_tokens_total - computed == 4  # 100 less 6 blocks of 16
        assert harness.stats.tier_hits_total == 96
        (outputs,) = [o for o in harness.outputs["again"] if o.num_cached_tokens is not None]
        assert outputs.num_cached_tokens == 96


class Reads:
    """Holds a tier's reads until they are let through, and says how many have come."""

    def __init__(self, harness: EngineHarness, name: Tier = Tier.HOST) -> None:
        self.num_begun = 0
        self._permits = threading.Semaphore(0)
        tier = harness.tiers.tier(name)
        read = tier.read

        def gated(placement: Placement, block: memoryview) -> bool:
            self.num_begun += 1
            assert self._permits.acquire(timeout=20)
            return read(placement, block)

        tier.read = gated  # type: ignore[method-assign]

    def let(self, num_blocks: int = 1000) -> None:
        self._permits.release(num_blocks)


def fill(harness: EngineHarness, names: str = "abcdef") -> None:
    """Every prompt once: the pool holds the last ones only, the tiers all that they were given."""
    for name in names:
        assert run(harness, name, PROMPTS[name]) == alone(PROMPTS[name])


def num_cached(harness: EngineHarness, name: str) -> int:
    (found,) = [
        o.num_cached_tokens for o in harness.outputs[name] if o.num_cached_tokens is not None
    ]
    return found


def test_a_lazy_store_goes_when_eviction_is_near() -> None:
    with engine(num_blocks=20, store="lazy") as harness:
        run(harness, "a", PROMPTS["a"])
        assert harness.stats.tiers[0].stored_blocks_total == 0  # 13 empty blocks stand in front
        fill(harness, "bcdef")
        assert harness.stats.tiers[0].stored_blocks_total > 12
        assert run(harness, "again", PROMPTS["a"]) == alone(PROMPTS["a"])
        assert num_cached(harness, "again") == 96


def test_what_is_used_once_stays_off_a_disk_that_asks_for_two(tmp_path: Path) -> None:
    with engine(size=0.0, disk_dir=str(tmp_path), disk_size=4 * MIB) as harness:
        run(harness, "a", PROMPTS["a"])
        assert harness.stats.tiers[0].num_blocks == 0
        run(harness, "b", PROMPTS["a"])
        assert harness.stats.tiers[0].num_blocks == 6


def test_a_restarted_worker_serves_its_prefixes_from_disk(tmp_path: Path) -> None:
    disk = {"size": 0.0, "disk_dir": str(tmp_path), "disk_size": 4 * MIB, "disk_threshold": 0}
    with engine(**disk) as harness:
        run(harness, "a", PROMPTS["a"])
    with engine(**disk) as harness:
        (stats,) = harness.core._offload.stats()
        assert (stats.tier, stats.num_blocks) == (Tier.DISK, 6)
        assert run(harness, "b", PROMPTS["a"]) == alone(PROMPTS["a"])
        assert num_cached(harness, "b") == 96
        assert harness.stats.computed_prompt_tokens_total == 4


@pytest.mark.parametrize("damaged", [0, 3, 5])
def test_flipped_bytes_are_a_miss_from_there_on(damaged: int, tmp_path: Path) -> None:
    disk = {"size": 0.0, "disk_dir": str(tmp_path), "disk_size": 4 * MIB, "disk_threshold": 0}
    with engine(**disk) as harness:
        run(harness, "a", PROMPTS["a"])
        block_bytes = harness.layout.block_bytes
    with (tmp_path / "worker-0" / "blocks").open("r+b") as file:
        file.seek(damaged * block_bytes + 100)
        byte = file.read(1)[0]
        file.seek(damaged * block_bytes + 100)
        file.write(bytes([byte ^ 1]))
    with engine(**disk) as harness:
        assert run(harness, "b", PROMPTS["a"]) == alone(PROMPTS["a"])
        assert num_cached(harness, "b") == 16 * damaged
        assert harness.stats.tiers[0].damaged_blocks_total == 1
        assert harness.stats.computed_prompt_tokens_total == 100 - 16 * damaged


def test_two_workers_of_one_folder_keep_apart(tmp_path: Path) -> None:
    disk = {"size": 0.0, "disk_dir": str(tmp_path), "disk_size": 1 * MIB, "disk_threshold": 0}
    with engine(**disk) as one, engine(**disk) as other:
        run(one, "a", PROMPTS["a"])
        run(other, "b", PROMPTS["b"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-0", "worker-1"]


def test_host_before_disk_and_disk_for_what_the_host_has_lost(tmp_path: Path) -> None:
    tiers = {
        "size": 0.05 * MIB,
        "disk_dir": str(tmp_path),
        "disk_size": 4 * MIB,
        "disk_threshold": 0,
    }
    with engine(**tiers) as harness:
        fill(harness)
        host, disk = harness.stats.tiers
        assert host.num_blocks == host.capacity_blocks == 7
        assert disk.num_blocks == 36
        assert run(harness, "again", PROMPTS["a"]) == alone(PROMPTS["a"])
        assert num_cached(harness, "again") == 96
        host, disk = harness.stats.tiers
        assert (host.loaded_blocks_total, disk.loaded_blocks_total) == (0, 6)


def test_a_sequence_waits_for_its_kv_while_others_run() -> None:
    with engine() as harness:
        fill(harness, "abcd")
        reads = Reads(harness)
        harness.inbox.post(AddRequest(make_request("again", PROMPTS["a"])))
        turn_until(lambda: reads.num_begun == 1, harness)
        assert (harness.stats.num_loading, harness.stats.num_running) == (1, 0)
        harness.core._offload.loads._compute_s_a_token = 1e6  # whatever it takes, to wait is faster
        harness.inbox.post(AddRequest(make_request("short", PROMPTS["f"][:20])))
        turn_until(lambda: bool(harness.finish_reasons("short")), harness)
        assert harness.stats.num_loading == 1
        reads.let()
        turn_until(lambda: bool(harness.finish_reasons("again")), harness)
        turn_until(harness.is_idle, harness)
        assert harness.tokens("again") == alone(PROMPTS["a"])
        assert num_cached(harness, "again") == 96


def test_a_tier_slower_than_computing_is_declined() -> None:
    with engine(
        load_rate=1000.0
    ) as harness:  # a block of 6,144 bytes takes 6 s, computing it 16 ms
        fill(harness, "abcd")
        assert run(harness, "again", PROMPTS["a"]) == alone(PROMPTS["a"])
        assert num_cached(harness, "again") == 0
        assert harness.stats.declined_load_tokens_total == 96
        assert harness.stats.tiers[0].loaded_blocks_total == 0


def test_a_load_that_turns_out_slow_is_cut_and_what_came_is_kept() -> None:
    with engine() as harness:
        fill(harness, "abcd")
        reads = Reads(harness)
        harness.core._offload.loads._compute_s_a_token = 1e-3
        reads.let(2)
        harness.inbox.post(AddRequest(make_request("again", PROMPTS["a"])))
        turn_until(lambda: bool(harness.finish_reasons("again")), harness)
        assert harness.tokens("again") == alone(PROMPTS["a"])
        assert num_cached(harness, "again") <= 32
        assert reads.num_begun == 3
        assert harness.pool.num_quarantined == 1  # the third block's reader is inside
        reads.let()
        turn_until(harness.is_idle, harness)
        assert harness.tiers.bytes_per_s(Tier.HOST) < 4e9


def test_a_client_that_leaves_during_a_load_leaves_nothing_behind() -> None:
    with engine() as harness:
        fill(harness, "abcd")
        harness.core._offload.loads._compute_s_a_token = 1e6
        reads = Reads(harness)
        harness.inbox.post(AddRequest(make_request("gone", PROMPTS["a"])))
        turn_until(lambda: reads.num_begun == 1, harness)
        abort(harness, "gone")
        turn_until(lambda: bool(harness.finish_reasons("gone")), harness)
        assert harness.pool.life.num_live_permits == 0
        assert harness.pool.num_quarantined == 1
        reads.let()
        turn_until(harness.is_idle, harness)
        assert run(harness, "again", PROMPTS["a"]) == alone(PROMPTS["a"])


def test_two_requests_of_one_prefix_load_it_once() -> None:
    with engine() as harness:
        fill(harness, "abcd")
        before = harness.stats.tiers[0].loaded_blocks_total
        requests = [make_request(name, PROMPTS["a"], max_tokens=4) for name in ("one", "two")]
        for request in requests:
            harness.inbox.post(AddRequest(request))
        turn_until(lambda: all(harness.finish_reasons(r.id) for r in requests), harness)
        turn_until(harness.is_idle, harness)
        expected = alone(PROMPTS["a"], max_tokens=4)
        assert [harness.tokens(r.id) for r in requests] == [expected, expected]
        assert harness.stats.tiers[0].loaded_blocks_total - before == 6
        assert [num_cached(harness, r.id) for r in requests] == [96, 96]


def test_choices_share_what_was_loaded() -> None:
    with engine() as harness:
        fill(harness, "abcd")
        request = make_request("again", PROMPTS["a"], n=3, temperature=0.9, max_tokens=6)
        harness.inbox.post(AddRequest(request))
        turn_until(lambda: len(harness.finish_reasons("again")) == 3, harness)
        turn_until(harness.is_idle, harness)
        assert [harness.tokens("again", choice) for choice in range(3)] == run_alone(request)
        assert harness.stats.tier_hits_total == 96


def test_a_preempted_sequence_comes_back_from_its_tier() -> None:
    with engine(num_blocks=15) as harness:
        requests = [make_request(name, PROMPTS[name], max_tokens=40) for name in "ab"]
        for request in requests:
            harness.inbox.post(AddRequest(request))
        turn_until(lambda: all(harness.finish_reasons(r.id) for r in requests), harness)
        turn_until(harness.is_idle, harness)
        assert harness.stats.preemptions_total >= 1
        assert harness.stats.tier_hits_total >= 16  # the rest of it was still in the pool
        assert harness.stats.computed_prompt_tokens_total < 200 + 2 * 16
        assert [[harness.tokens(r.id)] for r in requests] == [run_alone(r) for r in requests]


def test_a_session_is_computed_on_what_its_worker_has_in_tiers() -> None:
    decode = EngineHarness()
    with engine() as prefill:
        fill(prefill, "abcd")
        wire = Wire(decode, {"p": prefill})
        try:
            before = prefill.stats.computed_prompt_tokens_total
            request = make_request("split", PROMPTS["a"])
            decode.inbox.post(AddRequest(request, ["p"]))
            turn_until(lambda: bool(decode.finish_reasons("split")), decode, wire, prefill)
            turn_until(lambda: decode.is_idle() and prefill.is_idle(), decode, wire, prefill)
            assert decode.tokens("split") == alone(PROMPTS["a"])
            assert prefill.stats.computed_prompt_tokens_total - before == 4
            assert decode.stats.received_prompt_tokens_total == 100
        finally:
            decode.close()


def test_readers_of_events_know_what_tiers_hold_and_a_reset_clears_it() -> None:
    with engine(size=0.05 * MIB) as harness:
        events: list[CacheEvent] = []
        hear = harness.core._send

        def listen(message: Any) -> None:
            if isinstance(message, StepDone):
                events.extend(event for event in message.events if event.tier is Tier.HOST)
            hear(message)

        harness.core._send = listen
        fill(harness)
        assert {event.kind for event in events} == {EventKind.STORED, EventKind.REMOVED}
        assert replay(events) == snapshot(harness)[Tier.HOST]
        assert len(replay(events)) == 7
        harness.inbox.post(ResetPrefixCache())
        harness.turn()
        assert events[-1] == CacheEvent(EventKind.CLEARED, Tier.HOST)
        assert snapshot(harness) == {Tier.DEVICE: set(), Tier.HOST: set()}
        assert run(harness, "again", PROMPTS["a"]) == alone(PROMPTS["a"])
        assert num_cached(harness, "again") == 0


def replay(events: list[CacheEvent]) -> set[bytes]:
    held: set[bytes] = set()
    for event in events:
        if event.kind is EventKind.STORED:
            held |= set(event.hashes)
        elif event.kind is EventKind.REMOVED:
            held -= set(event.hashes)
        else:
            held = set()
    return held


def snapshot(harness: EngineHarness) -> dict[Tier, set[bytes]]:
    harness.inbox.post(TakeSnapshot(1))
    harness.turn()
    taken = harness.said.pop()
    assert isinstance(taken, SnapshotTaken)
    return {tier: set(hashes) for tier, hashes in taken.hashes.items()}


def test_one_that_overtakes_what_was_loaded_does_not_wait_for_it() -> None:
    """Both together are more than the pool: the loaded one must not be promised what the other one needs."""
    values = OffloadConfig(size=4 * MIB)
    harness = EngineHarness(num_blocks=16, scheduling_policy="priority", offload=values)
    try:
        fill(harness, "abcd")
        reads = Reads(harness)
        harness.core._offload.loads._compute_s_a_token = 1e6
        later = replace(make_request("later", PROMPTS["a"]), priority=1)
        first = replace(make_request("first", [*PROMPTS["e"], *PROMPTS["f"][:60]]), priority=0)
        harness.inbox.post(AddRequest(later))
        turn_until(lambda: reads.num_begun == 1, harness)
        reads.let()
        while harness.inbox._queue.empty():
            time.sleep(0.001)
        harness.inbox.post(AddRequest(first))  # heard in the turn that ends the load
        for request in (first, later):
            turn_until(lambda: bool(harness.finish_reasons(request.id)), harness)  # noqa: B023
            assert [harness.tokens(request.id)] == run_alone(request)
        turn_until(harness.is_idle, harness)
    finally:
        harness.close()
