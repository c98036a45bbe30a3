"""The tables of a run: each measure by configuration, and Baton beside the best of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import report
from benchmarks.peers.rounds import Record
from benchmarks.peers.timeline import spread
from benchmarks.peers.workloads import best_of, ratio

BATON = "baton"


def of_rounds(record: Record, num_rounds: int) -> dict[str, Any]:
    """Print medians and ratios; return them with the raw rounds."""
    measures = list(record.values)
    medians = {measure: report.medians(raw) for measure, raw in record.values.items()}
    names = list(dict.fromkeys(name for raw in record.values.values() for name in raw))
    report.print_table(
        f"medians of {num_rounds} rounds",
        ("configuration", *measures),
        [(name, *(_cell(medians[m].get(name)) for m in measures)) for name in names],
    )
    best = {measure: _beside_best(measure, medians[measure]) for measure in measures}
    rows = [
        (m, b["best_peer"], _cell(b["best"]), _cell(b["baton"]), _cell(b["ratio"]))
        for m, b in best.items()
        if b
    ]
    report.print_table(
        "Baton beside the best configuration of any peer (ratio above 1: Baton leads)",
        ("measure", "best peer", "best", "Baton", "ratio"),
        rows,
    )
    print(f"\n  figures taken again since others disturbed them: {record.num_repeated}")
    return {
        "measures": {
            measure: {
                "median": medians[measure],
                **best[measure],
                "spread": {name: round(spread(raw), 3) for name, raw in rounds.items()},
                "rounds": rounds,
                "foreign_share": record.foreign_shares[measure],
            }
            for measure, rounds in record.values.items()
        },
        "repeated": record.num_repeated,
        "failures": record.failures,
    }


def of_memory(weighed: Mapping[str, Any], torch_mib: float) -> None:
    """Print resident memory by configuration, and the share of torch."""
    totals = {n: w["total_mib"] for n, w in weighed.items() if "total_mib" in w}
    report.print_table(
        f"resident MiB (PSS) alone, KV budget written once; importing torch alone takes {torch_mib:.0f} MiB",
        ("configuration", "MiB"),
        [(name, round(total)) for name, total in totals.items()],
    )


def _beside_best(measure: str, medians: Mapping[str, float]) -> dict[str, Any]:
    others = {name: value for name, value in medians.items() if name != BATON}
    if not others:
        return {}
    name = best_of(measure, others)
    ours = medians.get(BATON)
    return {
        "best_peer": name,
        "best": others[name],
        "baton": ours,
        "ratio": None if ours is None else ratio(measure, ours, others[name]),
    }


def _cell(value: float | None) -> object:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else value
