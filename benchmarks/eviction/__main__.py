"""`make bench-eviction`: hit ratios of the eviction policies on Mooncake's traces, under Belady's bound.

The traces are those of "Mooncake" (FAST 2025, github.com/kvcache-ai/Mooncake, FAST25-release/traces); they are not part
of this repository. Ratios are shares of all blocks (512 tokens) that requests ask for, the first request's included.
Nothing here depends on the machine but `us_per_block`, what a policy costs.

Predicted before the first run, blocks hit at a capacity of 1k, 5k, 10k and 30k blocks:
- conversation: LRU 0.045, 0.11, 0.21, 0.33; ARC 0.06, 0.15, 0.24, 0.33; Belady 0.12, 0.24, 0.31, 0.36. Three quarters
  of its blocks are used once, which ARC keeps from driving out the others.
- synthetic: LRU 0.08, 0.28, 0.42, 0.62; ARC 0.13, 0.32, 0.45, 0.62; Belady 0.28, 0.48, 0.58, 0.64.
- prefix hits: equal to block hits for LRU, which keeps prefixes whole; 0.01 lower for ARC, whose two lists do not.
- one block costs a policy 1 us (LRU) and 2 us (ARC).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.eviction import chart
from benchmarks.eviction.replay import Trace, belady_hit_ratio, describe, read_trace, replay
from kvtransfer.tiers.policies import POLICIES

ROOT = Path(__file__).parents[2]
TRACES = {"conversation": "conversation_trace.jsonl", "synthetic": "synthetic_trace.jsonl"}
CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
CHART = ROOT / "docs" / "eviction.svg"


def measure(trace: Trace) -> dict[str, Any]:
    """One trace at every capacity below the number of its blocks, and at the first one above."""
    size = describe(trace)
    accesses = [block for chain in trace for block in chain]
    rows = []
    for capacity in CAPACITIES:
        row: dict[str, Any] = {"capacity": capacity}
        row["belady"] = belady_hit_ratio(accesses, capacity)
        row |= {name: replay(trace, name, capacity) for name in POLICIES}
        rows.append(row)
        print(f"  {capacity:,} blocks", flush=True)
        if capacity >= size["blocks"]:
            break
    return {**size, "rows": rows}


def print_figures(figures: dict[str, Any]) -> None:
    """A table a trace."""
    header = [
        "capacity",
        "belady",
        *(f"{name} {kind}" for name in POLICIES for kind in ("blocks", "prefix", "us")),
    ]
    kinds = ("hit_ratio", "prefix_hit_ratio", "us_per_block")
    for name, one in figures.items():
        rows = [
            [row["capacity"], row["belady"], *(row[p][kind] for p in POLICIES for kind in kinds)]
            for row in one["rows"]
        ]
        limit = one["hit_ratio_without_limit"]
        report.print_table(
            f"{name}: {one['blocks']:,} blocks, {limit:.3f} without limit", header, rows
        )


def draw(figures: dict[str, Any]) -> str:
    """The chart of what requests can use, under Belady's bound."""
    return chart.draw(
        {
            name: {
                "Belady (bound)": [(row["capacity"], row["belady"]) for row in one["rows"]],
                **{
                    policy.upper(): [
                        (row["capacity"], row[policy]["prefix_hit_ratio"]) for row in one["rows"]
                    ]
                    for policy in POLICIES
                },
            }
            for name, one in figures.items()
        }
    )


def main() -> None:
    """Replay, print, write results/eviction.json and docs/eviction.svg."""
    parser = argparse.ArgumentParser(prog="bench-eviction")
    parser.add_argument(
        "--traces",
        type=Path,
        default=ROOT.parent / "shared" / "data" / "traces" / "mooncake",
        help="folder of conversation_trace.jsonl and synthetic_trace.jsonl",
    )
    folder = parser.parse_args().traces
    missing = [file for file in TRACES.values() if not (folder / file).is_file()]
    if missing:
        sys.exit(
            f"bench-eviction: {folder} has no {' and no '.join(missing)}; get Mooncake's traces "
            "(github.com/kvcache-ai/Mooncake, FAST25-release/traces) and name their folder: ARGS='--traces FOLDER'"
        )
    figures: dict[str, Any] = {}
    for name, file in TRACES.items():
        print(name, flush=True)
        figures[name] = measure(read_trace(folder / file))
    print_figures(figures)
    CHART.write_text(draw(figures))
    report.write("eviction", figures)


if __name__ == "__main__":
    main()
