"""200 concurrent streams, a third of them cancelled at random moments: all others right, then nothing held."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.answers import Answer, ask_all, judge, mtbench_prompts
from tests.support.nodes import MODEL_NAME, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NUM_STREAMS, NUM_TOKENS, NUM_PROMPTS = 200, 16, 20
FIRST_PROMPT = 60  # others than those whose splitting is counted elsewhere
MAX_WAVES, MAX_GROWTH_MIB = 5, 32
"""A leak grows with every wave of streams; what an allocator keeps once does not."""


class Streamed(NamedTuple):
    """What one stream brought: its prompt's number, tokens, and whether the client left on purpose."""

    prompt: int
    token_ids: tuple[int, ...]
    is_cancelled: bool


async def stream(
    client: httpx.AsyncClient, number: int, text: str, leave_after: float | None
) -> Streamed:
    """One streamed greedy answer; the client leaves after that many seconds, if any."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    tokens: list[int] = []
    try:
        async with (
            asyncio.timeout(leave_after),
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        tokens += choice.get("token_ids") or []
    except TimeoutError:
        return Streamed(number, tuple(tokens), True)
    return Streamed(number, tuple(tokens), False)


async def run_streams(url: str, seed: int) -> list[Streamed]:
    """All streams at once; every third leaves within the time that the run takes."""
    chance = random.Random(seed)
    texts = mtbench_prompts(NUM_PROMPTS, FIRST_PROMPT)
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        return await asyncio.gather(
            *(
                stream(
                    client,
                    number % NUM_PROMPTS,
                    texts[number % NUM_PROMPTS],
                    chance.uniform(0.0, 20.0) if number % 3 == 0 else None,
                )
                for number in range(NUM_STREAMS)
            )
        )


def longest(sequences: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those that no other one begins with: the oracle judges every position, so the others are judged with them."""
    ordered = sorted(sequences)  # what goes on from a sequence follows it
    following = [*ordered[1:], ()]
    return [a for a, b in zip(ordered, following, strict=True) if b[: len(a)] != a]


def resident_mib(cluster: Cluster) -> float:
    """Memory of the gateway and of all workers, their engines included, without what the KV pools share."""
    pages = 0
    for node in (cluster.gateway, *cluster.workers.values()):
        assert node.process is not None
        for pid in (node.process.pid, *children(node.process.pid)):
            fields = Path(f"/proc/{pid}/statm").read_text().split()
            pages += int(fields[1]) - int(fields[2])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_two_hundred_streams_a_third_of_them_cancelled(
    split_cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = mtbench_prompts(NUM_PROMPTS, FIRST_PROMPT)
    first = asyncio.run(ask_all(split_cluster.url, texts, 1, concurrency=NUM_PROMPTS))
    prompts = [answer.prompt_ids for answer in first]
    asyncio.run(run_streams(split_cluster.url, seed=1))
    split_cluster.wait_idle()
    streams, growths = [], []
    for seed in range(2, 2 + MAX_WAVES):
        before = resident_mib(split_cluster)
        streams += asyncio.run(run_streams(split_cluster.url, seed))
        split_cluster.wait_idle()
        growths.append(resident_mib(split_cluster) - before)
        if growths[-1] < MAX_GROWTH_MIB:
            break

    whole = [s for s in streams if not s.is_cancelled]
    assert len(whole) >= len(streams) * 2 // 3
    assert any(s.is_cancelled and s.token_ids for s in streams), "somebody left in mid-answer"
    assert all(len(s.token_ids) == NUM_TOKENS for s in whole), "every other stream is complete"
    distinct = longest({(s.prompt, *s.token_ids) for s in streams if s.token_ids})
    void = judge([Answer(prompts[p], tuple(ids), 0) for p, *ids in distinct], may_be_void=2)
    with capsys.disabled():
        print(f"\n{len(whole)} whole, growth {growths} MiB, void by near ties: {void}")
    assert min(growths) < MAX_GROWTH_MIB, growths
