"""Requests, sequences and schedulers for tests, and a runner whose tokens are a hash of position."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from core.blocks import BlockLife
from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.kvcache.block_pool import BlockPool
from engine.sampler.rows import SampledToken
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.output import SchedulerOutput, SequenceUpdate
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence as EngineSequence
from engine.sequence import start_sequences
from tests.support.kv import BLOCK_SIZE, ROOT

EOS = 0


def make_request(
    name: str = "r",
    prompt: int | Sequence[int] = 20,
    output: tuple[tuple[int, ...], ...] = (),
    priority: int = 0,
    cache_salt: str = "",
    **sampling: Any,
) -> Request:
    """prompt: token ids, or how many of them, all different from other names' prompts."""
    if isinstance(prompt, int):
        first = zlib.crc32(name.encode()) % 10_000 + 1
        prompt = range(first, first + prompt)
    params = SamplingParams(**{"seed": 1, "max_tokens": 8, "temperature": 0.0, **sampling})
    return Request(
        RequestId(name),
        "model",
        tuple(prompt),
        params,
        output_token_ids=output,
        priority=priority,
        cache_salt=cache_salt,
    )


def make_sequence(*args: Any, num_groups: int = 1, **kwargs: Any) -> EngineSequence:
    (sequence,) = start_sequences(make_request(*args, **kwargs), num_groups)
    return sequence


def make_scheduler(
    num_usable: int = 100, caching: bool = True, num_groups: int = 1, **config: Any
) -> Scheduler:
    """A scheduler over a pool of blocks 1 .. num_usable."""
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "max_model_len": 1000,
        "eos_token_ids": frozenset({EOS}),
        "hash_root": ROOT if caching else None,
        **config,
    }
    pool = BlockPool(BlockLife(num_usable + 1), num_groups=num_groups)
    return Scheduler(SchedulerConfig(**settings), pool, num_groups)


def planned(output: SchedulerOutput) -> dict[str, int]:
    """Tokens by request name (and choice, where it is not the first)."""
    return {_name(item.sequence): item.num_tokens for item in output.items}


def sample(output: SchedulerOutput, tokens: Iterable[int] | None = None) -> list[SampledToken]:
    """Tokens for a step: those given, in the order of the rows, or a hash of each position."""
    rows = [
        (item.sequence, choice)
        for item in output.items
        for choice in range(item.sequence.choice, item.sequence.choice + item.num_samples)
    ]
    if tokens is not None:
        return [SampledToken(token_id) for token_id in tokens]
    return [SampledToken(hashed_token(sequence, choice)) for sequence, choice in rows]


def hashed_token(sequence: EngineSequence, choice: int) -> int:
    """The token that any run of this choice must have at this position: a function of all tokens before it."""
    history = ",".join(map(str, sequence.token_ids))
    return zlib.crc32(f"{choice}:{history}".encode()) % 49 + 1


def step(
    scheduler: Scheduler, tokens: Iterable[int] | None = None
) -> tuple[SchedulerOutput, list[SequenceUpdate]]:
    """Plan a step, sample, update, and check that everything agrees."""
    output = scheduler.schedule()
    updates = scheduler.update(output, sample(output, tokens))
    scheduler.check_integrity()
    return output, updates


def run_all(scheduler: Scheduler, max_steps: int = 10_000) -> list[SequenceUpdate]:
    """Step until nothing is left to do."""
    updates: list[SequenceUpdate] = []
    for _ in range(max_steps):
        if not scheduler.has_work:
            return updates
        updates += step(scheduler)[1]
    raise AssertionError(f"work is left after {max_steps} steps")


def pool_of(scheduler: Scheduler) -> BlockPool:
    return scheduler.kv.pool


def assert_idle(scheduler: Scheduler) -> None:
    """No sequence anywhere, no block held, no permit live."""
    pool = pool_of(scheduler)
    scheduler.check_integrity()
    counts = (scheduler.num_running, scheduler.num_waiting, scheduler.num_arriving)
    assert counts == (0, 0, 0)
    assert scheduler.num_sessions == 0
    assert (pool.num_held, pool.num_quarantined, pool.num_free) == (0, 0, pool.num_usable)
    assert pool.life.num_live_permits == 0


def _name(sequence: EngineSequence) -> str:
    suffix = f"#{sequence.choice}" if sequence.choice else ""
    return f"{sequence.request.id}{suffix}"
