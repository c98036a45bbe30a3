"""Workers killed, stopped and started again, clients that leave: what is answered is right, and nothing is held.

Real processes, one cluster for all tests: a prefill worker, whose link is slow enough for a fault to fall into a
transfer, and two decode workers. Leases are short, so that a worker that stands still outlives them. Answers are held
to the token against those of one engine that nothing disturbs: the host kernels promise equal bits.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from engine.config import EngineConfig
from engine.messages import AddRequest
from services.cluster.valkey import ValkeyServer
from tests.support.engines import AssembledEngine, make_request, turn_until
from tests.support.nodes import MODEL_NAME, Cluster, Node, run_cluster, wait_until
from tests.support.oracle import demo_model_path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_TOKENS = 28, 200, 64
LEASE_MS, SILENCE_MS, PREFILL_TIMEOUT_MS = 1000, 1000, 2000
ROLES = {"p": "prefill", "d1": "decode", "d2": "decode"}
ENGINE = {"num_blocks": 200, "max_model_len": 512, "max_num_batched_tokens": 128}
ARGUMENTS = [
    *("--num-gpu-blocks-override", "200"),
    *("--max-model-len", "512"),
    *("--max-num-batched-tokens", "128"),
    *("--link-rate", "5M"),
    *("--session-lease-ms", str(LEASE_MS)),
    *("--prefill-timeout-ms", str(PREFILL_TIMEOUT_MS)),
    *("--engine-silence-ms", str(SILENCE_MS)),
]
ANSWER_TIMEOUT_S = 25.0
"""No answer takes longer, whatever befalls its workers."""

BEFORE_KEEPALIVE_S = 7.0
"""Less than a control connection takes to notice a peer that stands still: leases and timeouts are shorter."""

Tokens = tuple[int, ...]


def make_prompts() -> list[Tokens]:
    """One for each request of this file, so that no cache has a part in it."""
    chance = random.Random(5)
    return [
        tuple(chance.randrange(100, 40_000) for _ in range(NUM_PROMPT_TOKENS))
        for _ in range(NUM_PROMPTS)
    ]


def undisturbed_answers(prompts: list[Tokens]) -> dict[Tokens, Tokens]:
    """What one engine alone says to each prompt."""
    model, cores = str(demo_model_path()), len(os.sched_getaffinity(0))
    config = EngineConfig(model=model, num_threads=cores, core_ledger="none", **ENGINE)
    engine = AssembledEngine(config)
    requests = [
        make_request(str(number), prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]
    with torch.inference_mode():
        for request in requests:
            engine.inbox.post(AddRequest(request))
        turn_until(lambda: all(engine.finish_reasons(r.id) for r in requests), engine, timeout_s=90)
        engine.close()
    return {r.prompt_token_ids: tuple(engine.tokens(r.id)) for r in requests}


@dataclass
class Reply:
    """What a client has of one streamed answer. error: the words that ended it, if any."""

    prompt: Tokens
    token_ids: list[int] = field(default_factory=list)
    error: str = ""


@dataclass
class Scene:
    """The cluster, prompts that nobody has asked yet, and the answers to them."""

    cluster: Cluster
    answers: dict[Tokens, Tokens]
    unasked: Iterator[Tokens]

    @property
    def prefill(self) -> Node:
        return self.cluster.workers["p"]

    @property
    def decodes(self) -> list[Node]:
        return [self.cluster.workers["d1"], self.cluster.workers["d2"]]

    @property
    def num_completed(self) -> int:
        """Sessions that ended complete, over the decode workers."""
        return sum(int(d.metrics()["baton:sessions_completed_total"]) for d in self.decodes)

    def owner(self) -> Node:
        """The decode worker that has a request."""
        found: list[Node] = []

        def is_owned() -> bool:
            found[:] = [d for d in self.decodes if d.metrics()["baton:open_requests"]]
            return len(found) == 1

        wait_until(is_owned, "one decode worker owns the request", 10)
        return found[0]

    def wait_mid_transfer(self) -> None:
        """Until P has blocks on their way."""
        wait_until(
            lambda: self.prefill.metrics()["baton:blocks_outstanding"] >= 2, "a transfer", 15
        )

    def check(self, reply: Reply) -> None:
        """Every token right, and the answer whole."""
        assert reply.error == ""
        assert tuple(reply.token_ids) == self.answers[reply.prompt]

    async def ask(self, reply: Reply | None = None) -> Reply:
        """A streamed answer, to its end."""
        reply = reply or Reply(next(self.unasked))
        body = {
            "model": MODEL_NAME,
            "prompt": reply.prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        async with (
            asyncio.timeout(ANSWER_TIMEOUT_S),
            httpx.AsyncClient(base_url=self.cluster.url, timeout=None) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                note_line(reply, line)
        return reply

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[tuple[Reply, asyncio.Task[Reply]]]:
        """An answer on its way."""
        reply = Reply(next(self.unasked))
        task = asyncio.create_task(self.ask(reply))
        try:
            yield reply, task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def settle(self) -> None:
        """Everyone at rest, and a new prompt is computed on P and sent to D as ever."""
        await asyncio.to_thread(self.cluster.wait_routable)
        await asyncio.to_thread(self.cluster.wait_idle)
        before = self.num_completed
        self.check(await self.ask())
        await asyncio.to_thread(self.cluster.wait_idle)
        assert self.num_completed == before + 1


def note_line(reply: Reply, line: str) -> None:
    """Take in one line of an event stream, or of the body of an error."""
    text = line.removeprefix("data: ")
    if not text.startswith("{"):
        return
    chunk = json.loads(text)
    if "error" in chunk:
        reply.error = chunk["error"]["message"]
        return
    for choice in chunk["choices"]:
        reply.token_ids += choice.get("token_ids") or []


@pytest.fixture(scope="module")
def scene(logs: Path, redis: ValkeyServer) -> Iterator[Scene]:
    prompts = make_prompts()
    answers = undisturbed_answers(prompts)
    with run_cluster(
        logs / "faults", ROLES, redis_url=redis.url, worker_arguments=ARGUMENTS
    ) as cluster:
        yield Scene(cluster, answers, iter(prompts))
        check_nothing_is_left(cluster)


def check_nothing_is_left(cluster: Cluster) -> None:
    """Each worker ends when asked, and takes its engine along."""
    for node in (*cluster.workers.values(), cluster.gateway):
        family = family_of(node)
        assert node.process is not None
        node.process.terminate()
        node.process.wait(15)
        wait_gone(family)


def family_of(node: Node) -> list[psutil.Process]:
    """A node's front and its engine."""
    assert node.process is not None
    front = psutil.Process(node.process.pid)
    return [front, *front.children(recursive=True)]


def wait_gone(family: list[psutil.Process]) -> None:
    def is_gone() -> bool:
        return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)

    wait_until(is_gone, "every process of a worker is gone", 10)


async def kill(node: Node) -> None:
    """SIGKILL to the front; nothing of it is left, and another one starts at its address."""
    family = family_of(node)
    node.kill()
    await asyncio.to_thread(wait_gone, family)
    node.start()


@contextmanager
def standing(node: Node, *, engine_only: bool = False) -> Iterator[None]:
    """The worker, or its engine alone, stands still meanwhile."""
    family = family_of(node)[engine_only:]
    for process in family:
        process.suspend()
    try:
        yield
    finally:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()


async def until(done: Callable[[], bool], what: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
    await asyncio.to_thread(wait_until, done, what, timeout_s)


# ---- P


@pytest.mark.failure_edge("P dies before transfer")
@pytest.mark.failure_edge("P restarts on same address")
async def test_prefill_killed_before_the_transfer(scene: Scene) -> None:
    with standing(scene.prefill, engine_only=True):
        async with scene.asking() as (_, task):
            await until(
                lambda: scene.prefill.metrics()["baton:open_prefill_streams"] == 1, "a call"
            )
            await kill(scene.prefill)
            scene.check(await task)
    await asyncio.to_thread(scene.prefill.wait_ready)
    await scene.settle()


@pytest.mark.failure_edge("P dies mid-transfer")
@pytest.mark.failure_edge("P restarts on same address")
async def test_prefill_killed_during_the_transfer(scene: Scene) -> None:
    async with scene.asking() as (_, task):
        await asyncio.to_thread(scene.wait_mid_transfer)
        await kill(scene.prefill)
        scene.check(await task)
    await asyncio.to_thread(scene.prefill.wait_ready)
    await scene.settle()


async def test_prefill_killed_after_the_transfer(scene: Scene) -> None:
    async with scene.asking() as (reply, task):
        await until(lambda: len(reply.token_ids) >= 2, "a token that needs the whole transfer")
        assert len(reply.token_ids) < NUM_TOKENS
        await kill(scene.prefill)
        scene.check(await task)
    await asyncio.to_thread(scene.prefill.wait_ready)
    await scene.settle()


@pytest.mark.failure_edge("prefill worker stopped")
@pytest.mark.parametrize("engine_only", [False, True], ids=["worker", "engine"])
async def test_prefill_stopped_during_the_transfer(scene: Scene, engine_only: bool) -> None:
    """The answer comes while P still stands: D computes what it lacks."""
    async with scene.asking() as (_, task):
        await asyncio.to_thread(scene.wait_mid_transfer)
        with standing(scene.prefill, engine_only=engine_only):
            async with asyncio.timeout(BEFORE_KEEPALIVE_S):
                scene.check(await task)
            await asyncio.sleep(1.5 * LEASE_MS / 1000)
    await scene.settle()


# ---- D


async def test_decode_killed_before_the_first_token(scene: Scene) -> None:
    """Nothing was given out, so the other decode worker answers."""
    with standing(scene.prefill, engine_only=True):
        async with scene.asking() as (_, task):
            owner = await asyncio.to_thread(scene.owner)
            await kill(owner)
            scene.check(await task)
    await asyncio.to_thread(owner.wait_ready)
    await scene.settle()


@pytest.mark.failure_edge("D dies holding P's lease")
async def test_decode_killed_during_the_transfer(scene: Scene) -> None:
    """Tokens are out: the client gets the rest of them from the other decode worker, and P lets go."""
    async with scene.asking() as (reply, task):
        await asyncio.to_thread(scene.wait_mid_transfer)
        owner = await asyncio.to_thread(scene.owner)
        await until(lambda: reply.token_ids != [], "a first token")
        await kill(owner)
        scene.check(await task)
    await asyncio.to_thread(owner.wait_ready)
    await scene.settle()


@pytest.mark.public_case("B39")
@pytest.mark.parametrize("is_asked", [False, True], ids=["killed", "asked to leave"])
async def test_decode_gone_while_it_decodes(scene: Scene, is_asked: bool) -> None:
    """Killed, or with no time to drain: the other one goes on, every token once."""
    async with scene.asking() as (reply, task):
        await until(lambda: len(reply.token_ids) >= 20, "twenty tokens")
        assert len(reply.token_ids) < NUM_TOKENS
        owner = await asyncio.to_thread(scene.owner)
        if is_asked:
            family = family_of(owner)
            assert owner.process is not None
            owner.process.terminate()
            await asyncio.to_thread(owner.process.wait, 15)
            await asyncio.to_thread(wait_gone, family)
            owner.start()
        else:
            await kill(owner)
        scene.check(await task)
    await asyncio.to_thread(owner.wait_ready)
    await scene.settle()


@pytest.mark.failure_edge("D dies holding P's lease")
async def test_decode_stopped_for_longer_than_its_lease(scene: Scene) -> None:
    """P lets go while D stands; D goes on with what has come and computes the rest."""
    async with scene.asking() as (_, task):
        await asyncio.to_thread(scene.wait_mid_transfer)
        owner = await asyncio.to_thread(scene.owner)
        with standing(owner):
            await until(
                lambda: not scene.prefill.metrics()["baton:held_blocks"],
                "P lets go",
                BEFORE_KEEPALIVE_S,
            )
            await asyncio.sleep(LEASE_MS / 1000)
        scene.check(await task)
    await scene.settle()


# ---- the client


@pytest.mark.failure_edge("client gone before P starts")
async def test_client_gone_before_prefill_starts(scene: Scene) -> None:
    with standing(scene.prefill, engine_only=True):
        async with scene.asking():
            await until(
                lambda: scene.prefill.metrics()["baton:open_prefill_streams"] == 1, "a call"
            )
        await until(lambda: not scene.prefill.metrics()["baton:open_prefill_streams"], "its end")
    await scene.settle()


@pytest.mark.failure_edge("client gone after P done, before D admits")
async def test_client_gone_during_the_transfer(scene: Scene) -> None:
    async with scene.asking() as (reply, _):
        await asyncio.to_thread(scene.wait_mid_transfer)
        await until(lambda: reply.token_ids != [], "a first token")
        assert len(reply.token_ids) == 1
    await scene.settle()


async def test_client_gone_while_decoding(scene: Scene) -> None:
    async with scene.asking() as (reply, _):
        await until(lambda: len(reply.token_ids) > 2, "some tokens")
        assert len(reply.token_ids) < NUM_TOKENS
    await scene.settle()
