"""Prefill, one and eight streams: our engine by its defaults and transformers' `generate` in float32, in turn.

The same file and as many threads on both sides; by default the engine keeps a GGUF file's weights in blocks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import report
from benchmarks.engine.in_process import InProcessEngine

NUM_THREADS = 2
VOCAB = 49_000
PREFILL_TOKENS = (512, 2000)
DECODE_PROMPT, DECODE_TOKENS = 32, 64
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 8, 256, 64


def run(model: str, rounds: int) -> dict[str, Any]:
    """Every workload, interleaved; figures are tokens a second."""
    torch.set_num_threads(NUM_THREADS)
    from tests.support.oracle import load_oracle

    oracle = load_oracle()
    engine = InProcessEngine(model, NUM_THREADS)
    figures: dict[str, Any] = {}
    rows = []
    try:
        for name, prompts, max_tokens, counted in _workloads():
            print(f"{name}", flush=True)
            sides = {
                "baton": _timed(partial(engine.generate, prompts, max_tokens), counted),
                "transformers": _timed(partial(_generate, oracle, prompts, max_tokens), counted),
            }
            raw = report.interleave(sides, rounds)
            median = report.medians(raw)
            ratio = median["baton"] / median["transformers"]
            figures[name] = {"tokens_per_s": median, "ratio": ratio, "rounds": raw}
            rows.append((name, median["baton"], median["transformers"], ratio))
    finally:
        engine.close()
    report.print_table(
        f"tokens/s, {NUM_THREADS} threads, demo model: Baton's defaults, transformers in float32",
        ("work", "baton", "transformers", "ratio"),
        rows,
    )
    return figures


def _workloads() -> list[tuple[str, list[list[int]], int, int]]:
    """(name, prompts, output tokens each, tokens the rate counts)."""
    chance = random.Random(1)

    def prompt(length: int) -> list[int]:
        return [chance.randrange(100, VOCAB) for _ in range(length)]

    prefill = [(f"prefill {n}", [prompt(n)], 1, n) for n in PREFILL_TOKENS]
    streams = [prompt(STREAM_PROMPT) for _ in range(STREAMS)]
    return [
        *prefill,
        ("decode, 1 stream", [prompt(DECODE_PROMPT)], DECODE_TOKENS, DECODE_TOKENS),
        (
            f"{STREAMS} streams, {STREAM_PROMPT} in",
            streams,
            STREAM_TOKENS,
            STREAMS * STREAM_TOKENS,
        ),
    ]


def _timed(work: Callable[[], object], counted: int) -> Callable[[], float]:
    def once() -> float:
        started = time.perf_counter()
        work()
        return counted / (time.perf_counter() - started)

    return once


@torch.inference_mode()
def _generate(oracle: Any, prompts: list[list[int]], max_tokens: int) -> object:
    ids = torch.tensor(prompts)
    return oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=2,
    )
