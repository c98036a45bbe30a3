"""The machine's limits, each kind in a process of its own: bytes read, float and byte products a second.

Compiles `limits.cpp` with the system's g++ at every run (a second or two); a kind that the machine's processor lacks
is left out by its exit code, and one that dies harms no other.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report

SOURCE = Path(__file__).with_name("limits.cpp")
COMPILE = ("g++", "-O2", "-std=c++17", "-pthread")
THREADS = (1, 2)
READ_MIB = (8, 96, 512, 2048)
"""A second-level cache's worth, the demo file's size, and two that no cache of a core's own holds."""

KINDS = {
    "fma_avx2": "fp32 FMA, AVX2, GFLOP/s",
    "fma_avx512": "fp32 FMA, AVX-512, GFLOP/s",
    "maddubs_avx2": "int8 maddubs, AVX2, GOP/s",
    "maddubs_avx512": "int8 maddubs, AVX-512, GOP/s",
    "vnni_avx2": "int8 VNNI, 256 bits, GOP/s",
    "vnni_avx512": "int8 VNNI, 512 bits, GOP/s",
    "bf16_avx512": "bf16 dot, AVX-512, GFLOP/s",
    "amx_int8": "int8 AMX, GOP/s",
    "amx_bf16": "bf16 AMX, GFLOP/s",
}
_UNSUPPORTED = 3


def run(num_repeats: int = 5) -> dict[str, Any]:
    """Every limit with one and two threads; prints a table, returns medians, best and raw values by limit."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        subprocess.run([*COMPILE, "-o", str(program), str(SOURCE)], check=True)
        wanted = {name: (kind, 0) for kind, name in KINDS.items()}
        wanted |= {f"read {mib} MiB, GB/s": ("read", mib) for mib in READ_MIB}
        figures = {}
        for name, (kind, mib) in wanted.items():
            raw = {
                threads: [_ask(program, kind, threads, mib) for _ in range(num_repeats)]
                for threads in THREADS
            }
            figures[name] = {f"{threads} threads": _sum_up(raw[threads]) for threads in THREADS}
    known = {name: rows for name, rows in figures.items() if all(rows.values())}
    report.print_table(
        f"limits of this machine, best (median) of {num_repeats}",
        ("limit", *(f"{threads} threads" for threads in THREADS)),
        [(name, *map(_cell, rows.values())) for name, rows in known.items()],
    )
    lacking = [name for name in figures if name not in known]
    if lacking:
        print(f"\n  not on this machine: {'; '.join(lacking)}")
    return known


def _ask(program: Path, kind: str, num_threads: int, mib: int) -> float | None:
    """One figure, None where the processor lacks the instructions."""
    done = subprocess.run(
        [str(program), kind, str(num_threads), str(mib)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == _UNSUPPORTED or done.returncode < 0:
        return None
    done.check_returncode()
    return float(done.stdout)


def _sum_up(values: list[float | None]) -> dict[str, Any]:
    """Best and median; empty when the machine cannot."""
    taken = [value for value in values if value is not None]
    if len(taken) < len(values):
        return {}
    return {"best": max(taken), "median": statistics.median(taken), "raw": taken}


def _cell(figure: dict[str, Any]) -> str:
    return f"{figure['best']:.0f} ({figure['median']:.0f})"
