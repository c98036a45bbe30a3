"""Routing with an index: prefixes attract, bursts spread, and an index that is away costs hits only."""

import asyncio
from typing import Any

import pytest

from core.block_hash import hash_chain
from core.events import CacheEvent, EventKind, Tier
from core.worker_info import Role, WorkerLoad, WorkerRates
from kvindex.base import IndexUnavailable, PublishResult
from kvindex.memory import MemoryIndex
from tests.support.fake_worker import FakeWorker, running_worker, say
from tests.support.gateways import asgi_gateway, eventually

LEASE_MS = 60_000
PROMPT = list(range(3, 3 + 100))


class AwayIndex(MemoryIndex):
    """An index that can be switched off."""

    is_away = False

    async def workers(self) -> Any:
        self._check()
        return await super().workers()

    async def match(self, chains: Any) -> Any:
        self._check()
        return await super().match(chains)

    async def reserve(self, *reservations: Any) -> None:
        self._check()
        await super().reserve(*reservations)

    async def release(self, request_id: Any) -> None:
        self._check()
        await super().release(request_id)

    async def speculate(self, *arguments: Any, **options: Any) -> None:
        self._check()
        await super().speculate(*arguments, **options)

    def _check(self) -> None:
        if self.is_away:
            raise IndexUnavailable("switched off")


async def register(
    index: MemoryIndex, *workers: FakeWorker, load: WorkerLoad | None = None
) -> None:
    for worker in workers:
        info = worker.info
        await index.register(info, LEASE_MS)
        await index.heartbeat(info.id, info.epoch, load or WorkerLoad(), LEASE_MS)


async def store(
    index: MemoryIndex, worker: FakeWorker, token_ids: list[int], tier: Tier = Tier.DEVICE
) -> None:
    info = worker.info
    chain = tuple(hash_chain(info.hash_root, token_ids))
    (state,) = [state for state in await index.workers() if state.info.id == info.id]
    number = (state.report.last_event_number or 0) + 1
    event = CacheEvent(EventKind.STORED, tier, hashes=chain)
    assert await index.publish(info.id, info.epoch, number, [event]) is PublishResult.APPLIED


async def test_a_cached_prefix_draws_requests():
    async with running_worker(say("x"), "w1") as w1, running_worker(say("x"), "w2") as w2:
        index = MemoryIndex()
        await register(index, w1, w2)
        await store(index, w2, PROMPT[:64])
        async with asgi_gateway(w1, w2, index=index) as gateway:
            for _ in range(4):
                await gateway.complete(prompt=PROMPT)
            assert (len(w1.submits), len(w2.submits)) == (0, 4)
            text = (await gateway.client.get("/metrics")).text
            assert "baton:route_expected_cached_tokens_total" in text


@pytest.mark.parametrize(
    ("load_rate", "chosen", "expected"),
    [(100_000.0, "w2", 96), (1_100.0, "w1", 64), (900.0, "w1", 64), (0.0, "w1", 64)],
)
async def test_a_prefix_in_a_tier_draws_requests_as_fast_as_it_loads(load_rate, chosen, expected):
    """96 tokens in a tier of w2 against 64 on the device of w1; what loads slowly or at no known rate draws none."""
    rates = WorkerRates(prefill_tokens_per_s=1_000.0, load_tokens_per_s=load_rate)
    async with (
        running_worker(say("x"), "w1", rates=rates) as w1,
        running_worker(say("x"), "w2", rates=rates) as w2,
    ):
        index = MemoryIndex()
        await register(index, w1, w2)
        await store(index, w1, PROMPT[:64])
        await store(index, w2, PROMPT[:16])
        await store(index, w2, PROMPT, Tier.DISK)
        async with asgi_gateway(w1, w2, index=index) as gateway:
            await gateway.complete(prompt=PROMPT)
            assert [w.info.id for w in (w1, w2) if w.submits] == [chosen]
            text = (await gateway.client.get("/metrics")).text
            assert f"baton:route_expected_cached_tokens_total {expected:.1f}" in text


@pytest.mark.parametrize(("load_rate", "reserved"), [(4_000.0, 4), (0.0, 84)])
async def test_tokens_to_be_loaded_are_not_reserved_as_computing(load_rate, reserved):
    rates = WorkerRates(prefill_tokens_per_s=1_000.0, load_tokens_per_s=load_rate)
    asked: list[int] = []

    class ListeningIndex(MemoryIndex):
        async def reserve(self, *reservations: Any) -> None:
            asked.extend(reservation.num_tokens for reservation in reservations)

    async with running_worker(say("x"), "w1", rates=rates) as w1:
        index = ListeningIndex()
        await register(index, w1)
        await store(index, w1, PROMPT[:16])
        await store(index, w1, PROMPT, Tier.HOST)
        async with asgi_gateway(w1, index=index) as gateway:
            await gateway.complete(prompt=PROMPT)
    assert asked == [reserved]


async def test_another_salt_finds_nothing_cached():
    async with running_worker(say("x"), "w1") as w1, running_worker(say("x"), "w2") as w2:
        index = MemoryIndex()
        await register(index, w1, w2)
        await store(index, w2, PROMPT)
        async with asgi_gateway(w1, w2, index=index) as gateway:
            await gateway.complete(prompt=PROMPT, cache_salt="other")
            assert (len(w1.submits), len(w2.submits)) == (1, 0)


async def test_what_was_just_routed_is_expected_to_be_cached():
    """A burst over one prefix goes to one worker before any event could tell that it is stored there."""
    async with running_worker(say("x"), "w1") as w1, running_worker(say("x"), "w2") as w2:
        index = MemoryIndex()
        await register(index, w1, w2)
        async with asgi_gateway(w1, w2, index=index) as gateway:
            for _ in range(3):
                await gateway.complete(prompt=PROMPT)
            assert sorted([len(w1.submits), len(w2.submits)]) == [0, 3]


async def test_decode_cached_prefix_spares_the_split():
    async with (
        running_worker(say("x"), "p", role=Role.PREFILL) as prefill,
        running_worker(say("x"), "d", role=Role.DECODE) as decode,
    ):
        index = MemoryIndex()
        await register(index, prefill, decode)
        async with asgi_gateway(prefill, decode, index=index) as gateway:
            await gateway.complete(prompt=PROMPT)
            await store(index, decode, PROMPT)
            await gateway.complete(prompt=PROMPT)
        split, local = decode.submits
        assert [c.control_address for c in split.prefill_candidates] == [prefill.address]
        assert [c.worker_id for c in split.prefill_candidates] == ["p"]
        assert not local.prefill_candidates
        assert not prefill.submits


@pytest.mark.public_case("B38")
@pytest.mark.parametrize("with_index", [True, False])
async def test_bursts_and_lone_requests_are_spread(with_index):
    """Load counts at selection; with nothing to tell workers apart they take turns."""
    slow = say("one two three", delay_s=0.02)
    async with running_worker(slow, "w1") as w1, running_worker(slow, "w2") as w2:
        index = MemoryIndex() if with_index else None
        if index is not None:
            await register(index, w1, w2)
        async with asgi_gateway(w1, w2, index=index) as gateway:
            await asyncio.gather(*(gateway.complete(prompt=[5 + n, *PROMPT]) for n in range(20)))
            assert len(w1.submits) == len(w2.submits) == 10
            for n in range(6):
                await gateway.complete(prompt=[30 + n, *PROMPT], max_tokens=2)
            assert abs(len(w1.submits) - len(w2.submits)) <= 2


async def test_reported_load_repels():
    async with running_worker(say("x"), "w1") as w1, running_worker(say("x"), "w2") as w2:
        index = MemoryIndex()
        await register(index, w1, load=WorkerLoad(num_running=30))
        await register(index, w2)
        async with asgi_gateway(w1, w2, index=index) as gateway:
            for n in range(4):
                await gateway.complete(prompt=[5 + n, *PROMPT])
            assert (len(w1.submits), len(w2.submits)) == (0, 4)


async def test_reservations_are_made_and_dropped():
    slow = say("one two three four", delay_s=0.05)
    async with running_worker(slow, "w1") as w1:
        index = MemoryIndex()
        await register(index, w1)
        async with asgi_gateway(w1, index=index) as gateway:
            running = asyncio.create_task(gateway.complete(prompt=PROMPT))
            await eventually(lambda: w1.submits, "submitted")
            await asyncio.sleep(0.02)
            (state,) = await index.workers()
            assert state.report.num_reservations == 1
            assert state.report.reserved_tokens == len(PROMPT)
            await running
            await gateway.state.router.close()
            (state,) = await index.workers()
            assert (state.report.num_reservations, state.report.reserved_tokens) == (0, 0)
            assert gateway.state.router.ledger.num_requests(w1.info.id) == 0


async def test_an_index_that_is_away_costs_no_request_and_is_taken_up_again():
    async with running_worker(say("x"), "w1") as w1, running_worker(say("x"), "w2") as w2:
        index = AwayIndex()
        await register(index, w1, w2)
        await store(index, w2, PROMPT)
        async with asgi_gateway(w1, w2, index=index, seeds=()) as gateway:
            index.is_away = True
            await gateway.wait_for(lambda: not gateway.state.directory.index_is_connected)
            for n in range(4):
                answer = await gateway.complete(prompt=[5 + n, *PROMPT])
                assert answer.status_code == 200
            assert len(w1.submits) == len(w2.submits) == 2
            health = await gateway.client.get("/health")
            assert health.status_code == 200
            assert health.json()["index"].startswith("away")
            assert "baton:index_connected 0.0" in (await gateway.client.get("/metrics")).text
            index.is_away = False
            await gateway.wait_for(lambda: gateway.state.directory.index_is_connected)
            await gateway.complete(prompt=PROMPT)
            assert len(w2.submits) == 3
            health = await gateway.client.get("/health")
            assert health.json()["index"] == "connected"


async def test_a_worker_too_old_for_its_record_gets_no_credit():
    """The index's word is about an epoch; a worker that restarted since holds nothing."""
    async with running_worker(say("x"), "w1") as w1, running_worker(say("x"), "w2") as w2:
        index = MemoryIndex()
        await register(index, w1, w2)
        await store(index, w2, PROMPT)
        async with asgi_gateway(w1, w2, index=index) as gateway:
            connection = gateway.state.directory.connection(w2.info.id)
            fields = {name: getattr(w2.info, name) for name in type(w2.info).__slots__}
            connection.info = type(w2.info)(**(fields | {"epoch": 99}))
            await gateway.complete(prompt=PROMPT)
            assert (len(w1.submits), len(w2.submits)) == (1, 0)
