"""How every benchmark states its figures: machine, commit, ratios and raw rounds, as a table and as JSON.

A figure is a median over interleaved rounds; what counts is the ratio of two medians of one run, since machines are
shared and noisy.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit measured, with `+changes` when the tree differs from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every side once a round, in turn, and collect what each returns."""
    raw: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, run in sides.items():
            raw[name].append(run())
        print(f"  round {number + 1} of {rounds}", flush=True)
    return raw


def medians(raw: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each side's rounds."""
    return {name: statistics.median(values) for name, values in raw.items()}


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain table."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    print(f"\n{title}")
    for row in ([*header], ["-" * width for width in widths], *cells):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def write(name: str, figures: Mapping[str, Any]) -> Path:
    """Write `results/NAME.json` with machine and commit."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    stated = {
        "benchmark": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "commit": commit(),
        **figures,
    }
    path.write_text(json.dumps(stated, indent=1) + "\n")
    print(
        f"\nwritten to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
    )
    return path


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    )
    return done.stdout.strip() or ("unknown" if arguments[0] == "rev-parse" else "")
