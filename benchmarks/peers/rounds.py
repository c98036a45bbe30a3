"""Interleaved rounds: each peer in turn wakes, answers every workload on an idle machine, and is held again."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.client import ServerRefusedError
from benchmarks.peers.idle import MAX_FOREIGN_SHARE, Watch, wait_idle
from benchmarks.peers.peer import Peer
from benchmarks.peers.processes import ServerDiedError
from benchmarks.peers.shared_machine import is_realtime, turn
from benchmarks.peers.workloads import Figures, Workload, warm_up

MAX_ATTEMPTS = 6
REALTIME_FOREIGN_SHARE = 0.06
"""The kernel leaves ordinary processes 5% beside real-time ones."""


@dataclass
class Record:
    """Raw rounds by measure and peer, with what others took of the machine while each figure was taken."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    foreign_shares: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    num_repeated: int = 0

    def add(self, name: str, figures: Figures, foreign_share: float) -> None:
        """Keep the figures of one workload."""
        for measure, value in figures.items():
            self.values.setdefault(measure, {}).setdefault(name, []).append(value)
            shares = self.foreign_shares.setdefault(measure, {}).setdefault(name, [])
            shares.append(round(foreign_share, 4))


def run_rounds(
    peers: Mapping[str, Peer],
    chosen: Sequence[Workload],
    num_rounds: int,
    keep: Callable[[Record], None],
    lock_path: str = "",
) -> Record:
    """All rounds. Peers are paused when this begins and when it ends; one that fails is left out from then on.

    keep: called after every round with what there is, so that an interrupted run is not lost.
    """
    record = Record()
    names = list(peers)
    for number in range(num_rounds):
        start = number % max(1, len(names))
        for name in names[start:] + names[:start]:
            if name not in record.failures:
                with turn(lock_path):
                    _take_turn(name, peers[name], chosen, number, record)
        keep(record)
        print(f"  round {number + 1} of {num_rounds}", flush=True)
    return record


def allowed_foreign_share() -> float:
    """What others may take of all cores while a figure is taken, by the priority at which it is taken."""
    return REALTIME_FOREIGN_SHARE if is_realtime() else MAX_FOREIGN_SHARE


def _take_turn(
    name: str, peer: Peer, chosen: Sequence[Workload], number: int, record: Record
) -> None:
    peer.process.resume()
    try:
        peer.wait_ready()
        warm_up(peer, random.Random(f"{number} {name}"))
        for workload in chosen:
            _measure(name, peer, workload, number, record)
    except (ServerDiedError, ServerRefusedError, OSError, ValueError) as error:
        record.failures[name] = f"round {number + 1}: {type(error).__name__}: {error}"
        print(f"  {name} failed in {record.failures[name]}", flush=True)
    finally:
        peer.process.pause()


def _measure(name: str, peer: Peer, workload: Workload, number: int, record: Record) -> None:
    """One figure on an idle machine; a disturbed one is taken again, and the least disturbed of all counts."""
    tries: list[tuple[float, Figures]] = []
    for attempt in range(MAX_ATTEMPTS):
        if not is_realtime():
            wait_idle(peer.process.pids)
        chance = random.Random(f"{workload.name} {number} {attempt}")
        with Watch(peer.process.pids) as watch:
            figures = workload.run(peer, chance)
        tries.append((watch.foreign_share, figures))
        if watch.foreign_share <= allowed_foreign_share():
            break
    record.num_repeated += len(tries) - 1
    share, figures = min(tries, key=lambda tried: tried[0])
    record.add(name, figures, share)
