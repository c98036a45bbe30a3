"""What the scheduler decides, step by step, and that no decision of its own changes an answer.

A fake model gives the next token from the tokens so far, so an answer is known before it is scheduled.
"""

from __future__ import annotations

import random
from typing import Any
from zlib import crc32

import pytest

from core.block_hash import HashRoot
from core.blocks import BlockLife
from core.errors import ContextTooLong, InvalidRequest
from core.ids import RequestId
from core.kv_identity import KVIdentity
from core.request import Request, SamplingParams
from engine.kvcache.block_pool import BlockPool
from engine.sampler.rows import SampledToken
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.output import SchedulerOutput, SequenceUpdate
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, start_sequences

VOCAB, EOS, BLOCK_SIZE = 1000, 999, 16
ROOT = HashRoot.of(KVIdentity("m", "float32", "float32", "", ()))


def make_scheduler(*, num_blocks: int = 64, **config: Any) -> Scheduler:
    values = {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 512,
        "eos_token_ids": frozenset([EOS]),
        "vocab_size": VOCAB,
        "hash_root": ROOT,
        **config,
    }
    return Scheduler(SchedulerConfig(**values), BlockPool(BlockLife(num_blocks + 1)))


def make_request(name: str, prompt: list[int], *, priority: int = 0, **sampling: Any) -> Request:
    params = SamplingParams(**{"seed": 1, "max_tokens": 8, **sampling})
    return Request(RequestId(name), "m", tuple(prompt), params, priority=priority)


def next_token(token_ids: list[int], choice: int) -> int:
    """What the fake model says after these tokens; the first token of a choice depends on the choice."""
    return crc32(repr((token_ids, choice)).encode()) % (VOCAB - 1)


def answer_of(request: Request, choice: int = 0) -> list[int]:
    tokens = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens, choice))
    return tokens[len(request.prompt_token_ids) :]


def run_step(scheduler: Scheduler) -> tuple[SchedulerOutput, list[SequenceUpdate]]:
    output = scheduler.schedule()
    sampled = [
        SampledToken(next_token(item.sequence.token_ids, choice))
        for item in output.items
        for choice in range(item.sequence.choice, item.sequence.choice + item.num_samples)
    ]
    updates = scheduler.update(output, sampled)
    scheduler.check_integrity()
    return output, updates


def run_all(scheduler: Scheduler, max_steps: int = 4000) -> dict[tuple[str, int], list[int]]:
    answers: dict[tuple[str, int], list[int]] = {}
    for _ in range(max_steps):
        if not scheduler.has_work:
            break
        for update in run_step(scheduler)[1]:
            key = (update.sequence.request.id, update.choice)
            answers.setdefault(key, []).extend(token.token_id for token in update.tokens)
    assert not scheduler.has_work, "every request ends"
    assert scheduler.num_running == scheduler.num_waiting == 0
    return answers


def add(scheduler: Scheduler, request: Request) -> Sequence:
    (sequence,) = start_sequences(request)
    scheduler.add(sequence)
    return sequence


def counts(output: SchedulerOutput) -> dict[str, int]:
    return {item.sequence.request.id: item.num_tokens for item in output.items}


def test_a_long_prompt_runs_in_chunks_and_never_holds_up_a_decode() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("short", [1] * 10))
    assert counts(run_step(scheduler)[0]) == {"short": 10}
    add(scheduler, make_request("long", list(range(2, 152))))
    chunks = [counts(run_step(scheduler)[0]) for _ in range(4)]
    assert chunks == [{"short": 1, "long": n} for n in (63, 63, 24, 1)]


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("long", list(range(150))))
    samples = [run_step(scheduler)[0].items[0].num_samples for _ in range(3)]
    assert samples == [0, 0, 1]


def test_a_cached_prefix_is_not_scheduled_again() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", list(range(100)), max_tokens=1))
    run_all(scheduler)
    second = add(scheduler, make_request("b", list(range(100)), max_tokens=1))
    output, _ = run_step(scheduler)
    assert (output.items[0].start, output.items[0].num_tokens) == (96, 4)
    assert second.num_cached_tokens == 96


@pytest.mark.peer_vectors
def test_a_prompt_that_is_cached_whole_computes_its_last_block() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        add(scheduler, make_request(name, list(range(64)), max_tokens=1))
        output, _ = run_step(scheduler)
        run_all(scheduler)
    assert (output.items[0].start, output.items[0].num_tokens) == (48, 16)


def test_the_youngest_gives_way_and_its_answer_stays_the_same() -> None:
    scheduler = make_scheduler(num_blocks=6)
    requests = [make_request(name, [i] * 30, max_tokens=30) for i, name in enumerate("ab")]
    for request in requests:
        add(scheduler, request)
    answers = run_all(scheduler)
    assert scheduler.counters.preemptions > 0
    for request in requests:
        assert answers[request.id, 0] == answer_of(request)


def test_priority_goes_before_arrival() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    for name, priority in (("late", 5), ("soon", 1), ("sooner", 0)):
        add(scheduler, make_request(name, [3] * 5, priority=priority, max_tokens=1))
    order = [run_step(scheduler)[0].items[0].sequence.request.id for _ in range(3)]
    assert order == ["sooner", "soon", "late"]


@pytest.mark.parametrize(
    ("sampling", "tokens", "expected"),
    [
        ({}, [EOS], ("stop", None)),
        ({"ignore_eos": True}, [EOS], ("", None)),
        ({"stop_token_ids": (7,)}, [7], ("stop", 7)),
        ({"min_tokens": 2, "stop_token_ids": (7,)}, [7], ("", None)),
        ({"min_tokens": 2, "stop_token_ids": (7,)}, [7, 7], ("stop", 7)),
        ({"max_tokens": 2}, [1, 2], ("length", None)),
        ({"max_tokens": 1}, [EOS], ("stop", None)),
    ],
)
def test_when_a_choice_ends(
    sampling: dict[str, Any], tokens: list[int], expected: tuple[str, int | None]
) -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, make_request("r", [1, 2, 3], **sampling))
    for token in tokens:
        updates = scheduler.update(scheduler.schedule(), [SampledToken(token)])
    assert (updates[0].finish_reason, updates[0].stop_token_id) == expected
    assert sequence.is_finished == bool(expected[0])


def test_the_model_s_length_ends_any_choice() -> None:
    scheduler = make_scheduler(max_model_len=40)
    request = make_request("r", [5] * 30, max_tokens=100)
    add(scheduler, request)
    assert len(run_all(scheduler)["r", 0]) == 10


@pytest.mark.parametrize(
    ("prompt", "num_blocks", "error"),
    [
        ([1] * 512, 64, ContextTooLong),
        ([1] * 100, 4, ContextTooLong),
        ([VOCAB], 64, InvalidRequest),
    ],
    ids=["model", "pool", "token id"],
)
def test_what_can_never_run_is_refused(
    prompt: list[int], num_blocks: int, error: type[Exception]
) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks)
    with pytest.raises(error):
        add(scheduler, make_request("r", prompt))
    assert not scheduler.has_work


def test_choices_share_the_prompt_and_part_at_their_first_token() -> None:
    scheduler = make_scheduler()
    request = make_request("r", list(range(40)), n=3, max_tokens=6)
    add(scheduler, request)
    run_step(scheduler)
    output, _ = run_step(scheduler)
    assert [item.num_tokens for item in output.items] == [1, 1, 1]
    assert len(output.copies) == 2, "the last one to write keeps the tail itself"
    shared = [item.sequence.block_table.ids()[:2] for item in output.items]
    assert shared[0] == shared[1] == shared[2]
    run_all(scheduler)


@pytest.mark.parametrize("seed", range(12))
def test_budget_blocks_company_and_aborts_change_no_answer(seed: int) -> None:
    chance = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=chance.choice([12, 20, 60]),
        max_num_batched_tokens=chance.choice([8, 17, 64]),
        policy=chance.choice(["fcfs", "priority"]),
        hash_root=chance.choice([ROOT, None]),
    )
    requests, aborted = [], set()
    answers: dict[tuple[str, int], list[int]] = {}
    for number in range(40):
        prompt = [chance.randrange(3)] * 16 + [chance.randrange(50) for _ in range(number % 60)]
        request = make_request(
            f"r{number}",
            prompt,
            priority=chance.randrange(3),
            n=chance.choice([1, 1, 1, 2, 3]),
            max_tokens=chance.randrange(1, 30),
            ignore_eos=True,
        )
        requests.append(request)
        add(scheduler, request)
        for _ in range(chance.randrange(4)):
            for update in run_step(scheduler)[1]:
                key = (update.sequence.request.id, update.choice)
                answers.setdefault(key, []).extend(t.token_id for t in update.tokens)
        if chance.random() < 0.2:
            gone = chance.choice(requests)
            if scheduler.abort(gone.id):
                aborted.add(gone.id)
            scheduler.check_integrity()
    for key, tokens in run_all(scheduler).items():
        answers.setdefault(key, []).extend(tokens)
    for request in requests:
        if request.id in aborted:
            continue
        for choice in range(request.sampling.n):
            assert answers[request.id, choice] == answer_of(request, choice), (request.id, choice)
