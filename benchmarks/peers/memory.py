"""Resident memory of each server, started alone and with its whole KV budget written once.

Alone, because a proportional set size splits a library's pages among all who map them. Also what a process that does
nothing but import torch holds: the share of Baton's (and others') memory that no code of theirs decides.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import Entry
from benchmarks.peers.peer import KV_TOKENS
from benchmarks.peers.processes import pss_bytes
from benchmarks.peers.shared_machine import turn
from benchmarks.peers.workloads import fill

MIB = 2**20
_HOLD = "import sys; print(flush=True); sys.stdin.read()"


def weigh_all(entries: Mapping[str, Entry], logs: Path, lock_path: str = "") -> dict[str, Any]:
    """MiB by entry, in total and by process; none of the entries may be running."""
    weighed: dict[str, Any] = {}
    for name, entry in entries.items():
        try:
            with turn(lock_path):
                weighed[name] = _weigh(name, entry, logs)
        except (OSError, RuntimeError, ValueError) as error:
            weighed[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"  memory of {name}: {weighed[name].get('total_mib', 'failed')} MiB", flush=True)
    return weighed


def torch_share_mib() -> float:
    """Resident MiB that importing torch adds to a bare interpreter of this environment."""
    return round(_held_mib("import torch; " + _HOLD) - _held_mib(_HOLD), 1)


def _weigh(name: str, entry: Entry, logs: Path) -> dict[str, Any]:
    peer = entry.start(name, logs)
    try:
        peer.wait_ready()
        fill(peer, random.Random(name), KV_TOKENS)
        by_process = {
            process: round(size / MIB, 1) for process, size in peer.process.pss_bytes().items()
        }
    finally:
        peer.process.stop()
    return {"total_mib": round(sum(by_process.values()), 1), "processes_mib": by_process}


def _held_mib(program: str) -> float:
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        held = pss_bytes(process.pid)
        process.communicate()
    return held / MIB
