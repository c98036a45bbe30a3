"""Times what a card does, side by side: each side once a round, in turn, median of the rounds.

A call is repeated until a round has something to measure, after runs that compile and warm up. The same code runs on
the host, so that everything but the figures can be tried without a card.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

WARM_UP_CALLS = 3
ROUNDS = 7
ROUND_MS = 20.0


def measure(
    sides: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, dict[str, Any]]:
    """For each side the median milliseconds of a call, and the raw rounds; what cannot run says why."""
    figures: dict[str, dict[str, Any]] = {}
    repeats: dict[str, int] = {}
    for name, call in sides.items():
        try:
            for _ in range(WARM_UP_CALLS):
                call()
            once_ms = _round_ms(call, 1, device)
        except (RuntimeError, ImportError) as error:
            figures[name] = {"failed": str(error).splitlines()[0]}
            continue
        repeats[name] = max(1, min(1000, int(ROUND_MS / max(once_ms, 1e-3))))
    raw: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(ROUNDS):
        for name, count in repeats.items():
            raw[name].append(_round_ms(sides[name], count, device))
    for name, values in raw.items():
        figures[name] = {"ms": statistics.median(values), "rounds": values}
    return figures


def _round_ms(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Milliseconds of one call, over `count` of them queued one behind the other."""
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / count
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) * 1000 / count


def ratio(figures: Mapping[str, Mapping[str, Any]], other: str, own: str) -> float | None:
    """How many times as long the other side takes as the own one, None where either did not run."""
    if "ms" not in figures.get(other, {}) or "ms" not in figures[own]:
        return None
    return float(figures[other]["ms"] / figures[own]["ms"])
