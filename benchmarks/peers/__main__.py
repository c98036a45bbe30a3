"""`make bench-peers`: Baton's mixed worker beside llama.cpp, OpenVINO, vLLM and transformers, in turn.

    make bench-peers                                               everything, 5 rounds (about an hour)
    make bench-peers ARGS="--peers openvino,llama.cpp --rounds 2 --output peers-trial"
    make bench-peers ARGS="--accuracy"                             the accuracy part alone

Missing peers are installed into `.peers/` first. Every server is started once and held by SIGSTOP while another is
measured; every figure is taken on an idle machine, or again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.peers import accuracy, catalogue, memory, tables, versions
from benchmarks.peers.catalogue import Entry
from benchmarks.peers.idle import MAX_FOREIGN_SHARE
from benchmarks.peers.peer import KV_TOKENS, NUM_THREADS, Peer
from benchmarks.peers.rounds import Record, run_rounds
from benchmarks.peers.shared_machine import go_realtime, is_realtime, turn
from benchmarks.peers.workloads import workloads

HOW = (
    f"{NUM_THREADS} threads a server, KV budget {KV_TOKENS} tokens, greedy, equal token-id prompts; each server "
    "through its own HTTP (OpenVINO and transformers have none: driven in a child process, which favours them); "
    "servers that are not measured are stopped by SIGSTOP; rounds interleaved, figures are medians; a figure during "
    f"which others took more than {MAX_FOREIGN_SHARE:.0%} of the cores is taken again"
)


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    arguments = _parser().parse_args()
    if arguments.realtime:
        go_realtime()
    known = catalogue.entries(shlex.split(arguments.baton_args))
    names = arguments.peers or ",".join(dict.fromkeys(entry.peer for entry in known.values()))
    entries = catalogue.chosen(names, known)
    logs = Path(tempfile.mkdtemp(prefix="bench-peers-"))
    print(f"{', '.join(entries)}; logs in {logs}\n{HOW}", flush=True)
    if arguments.accuracy:
        report.write(
            arguments.output or "peers-accuracy",
            {"versions": _versions(entries), **accuracy.run(entries, logs, arguments.lock)},
        )
        return
    figures = _measure(arguments, entries, logs)
    report.write(arguments.output or "peers", figures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench-peers")
    listed = ", ".join(workloads())
    parser.add_argument("--peers", default="", help="names of peers or of single configurations")
    parser.add_argument("--workloads", default="", help=f"of {listed}, memory, limits")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--baton-args", default="", help="more arguments for `baton up`")
    parser.add_argument("--accuracy", action="store_true", help="the accuracy part, nothing else")
    parser.add_argument("--lock", default="", help="file that others lock while they measure")
    parser.add_argument(
        "--realtime", action="store_true", help="keep other processes off the cores (needs root)"
    )
    parser.add_argument("--output", default="", help="name of the file in benchmarks/results")
    return parser


def _measure(
    arguments: argparse.Namespace, entries: Mapping[str, Entry], logs: Path
) -> dict[str, Any]:
    known = workloads()
    wanted = list(filter(None, arguments.workloads.split(","))) or [*known, "memory", "limits"]
    if unknown := set(wanted) - {*known, "memory", "limits"}:
        raise SystemExit(f"--workloads: unknown: {', '.join(unknown)}")
    how = HOW + ("; at real-time priority, since others used the machine" if is_realtime() else "")
    figures: dict[str, Any] = {"how": how, "versions": _versions(entries)}
    if "limits" in wanted:
        from benchmarks.limits import measure

        with turn(arguments.lock):
            figures["limits"] = measure.run()
    chosen = [workload for name, workload in known.items() if name in wanted]
    if chosen:
        with _running(entries, logs) as peers:
            keep = partial(_keep, logs / "rounds.json")
            record = run_rounds(peers, chosen, arguments.rounds, keep, arguments.lock)
        figures |= tables.of_rounds(record, arguments.rounds)
    if "memory" in wanted:
        weighed = memory.weigh_all(entries, logs, arguments.lock)
        figures["memory"] = weighed
        figures["torch_share_mib"] = memory.torch_share_mib()
        tables.of_memory(weighed, figures["torch_share_mib"])
    return figures


def _keep(path: Path, record: Record) -> None:
    path.write_text(json.dumps(asdict(record), indent=1))


@contextmanager
def _running(entries: Mapping[str, Entry], logs: Path) -> Iterator[dict[str, Peer]]:
    """Every entry started and then paused, one after the other."""
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for name, entry in entries.items():
            peer = entry.start(name, logs)
            stack.callback(peer.process.stop)
            peer.wait_ready()
            peer.process.pause()
            peers[name] = peer
            print(f"  started {name}", flush=True)
        yield peers


def _versions(entries: Mapping[str, Entry]) -> dict[str, str]:
    return versions.of_peers(entry.peer for entry in entries.values())


if __name__ == "__main__":
    main()
