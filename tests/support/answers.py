"""Greedy answers through the chat endpoint, and whether they are transformers' own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import httpx
import torch

from tests.support.nodes import MODEL_NAME
from tests.support.oracle import Mismatch, teacher_forced_check

QUESTIONS = Path(__file__).parents[1] / "data" / "mtbench" / "question.jsonl"
REQUEST_TIMEOUT_S = 300.0


class Answer(NamedTuple):
    """What came back, in tokens."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    cached_tokens: int


def mtbench_prompts(count: int, start: int = 0) -> list[str]:
    """First turns of MT-bench questions `[start, start + count)`, of 80."""
    lines = QUESTIONS.read_text().splitlines()[start : start + count]
    assert len(lines) == count
    return [json.loads(line)["turns"][0] for line in lines]


async def ask(client: httpx.AsyncClient, text: str, max_tokens: int) -> Answer:
    """One greedy answer."""
    asked = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}]}
    tokenized = await client.post("/tokenize", json=asked)
    response = await client.post(
        "/v1/chat/completions",
        json={**asked, "temperature": 0, "max_tokens": max_tokens, "return_token_ids": True},
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    return Answer(
        tuple(tokenized.json()["tokens"]),
        tuple(answer["choices"][0]["token_ids"]),
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


async def ask_all(
    url: str, texts: Sequence[str], max_tokens: int, concurrency: int
) -> list[Answer]:
    """Greedy answers to all texts, at most `concurrency` at once."""
    return await ask_within(url, texts, max_tokens, asyncio.Semaphore(concurrency))


async def ask_within(
    url: str, texts: Sequence[str], max_tokens: int, places: asyncio.Semaphore
) -> list[Answer]:
    """Greedy answers to all texts, as many at once as there are places; more of them can be released meanwhile."""
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:

        async def one(text: str) -> Answer:
            async with places:
                return await ask(client, text, max_tokens)

        return await asyncio.gather(*map(one, texts))


@lru_cache(maxsize=4096)
def first_mismatch(prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> Mismatch | None:
    """Where an answer leaves transformers' greedy choice, None where it never does."""
    return next(iter(teacher_forced_check(prompt_ids, token_ids)), None)


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Torch computes with every core of this process meanwhile: whoever asks for it has nobody beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def judge(answers: Sequence[Answer], may_be_void: int) -> list[str]:
    """Assert that all answers are transformers' own; describe those that near ties make void."""
    void = []
    with on_all_cores():
        mismatches = [first_mismatch(answer.prompt_ids, answer.token_ids) for answer in answers]
    for number, mismatch in enumerate(mismatches):
        if mismatch is None:
            continue
        assert mismatch.is_near_tie, f"answer {number} has a wrong token: {mismatch}"
        void.append(f"answer {number}: {mismatch}")
    assert len(void) <= may_be_void, void
    return void
