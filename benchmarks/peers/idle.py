"""Whether a figure was taken on an idle machine: before it by waiting, during it by accounting.

A round that other processes disturbed is no measurement. `Watch` therefore adds up what the machine's cores did and
takes away what the measured processes did; the rest is somebody else's, as a share of all cores. Standard library
only. Linux only (/proc).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

MAX_FOREIGN_SHARE = 0.04
"""More of all cores' time than this taken by others makes a round void (of 2 cores: 8% of one)."""

LOOK_S = 0.5
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
NUM_CORES = os.cpu_count() or 1


def machine_busy_s() -> float:
    """Seconds that all cores together were busy since boot, time stolen by a hypervisor included."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) * TICK_S


def process_busy_s(pid: int) -> float:
    """Seconds of processor time of one process and of its children that ended; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) * TICK_S


def tree(pid: int) -> list[int]:
    """A process and its descendants, as they are now."""
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@dataclass
class Watch:
    """Counts, while it is entered, the share of all cores that went to processes other than `pids` and this one.

    Processes of `pids` must live as long as the watch: what starts and ends in between is counted with its parent.
    """

    pids: Iterable[int] = ()
    foreign_share: float = 0.0
    seconds: float = 0.0
    _started: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), repr=False)

    def __enter__(self) -> Watch:
        self.pids = [*self.pids, os.getpid()]
        self._started = self._now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        at, busy, own = (now - then for now, then in zip(self._now(), self._started, strict=True))
        self.seconds = at
        # Ticks are counted at different moments for the machine and for a process: a few may be missing.
        self.foreign_share = max(0.0, busy - own - 2 * TICK_S) / (at * NUM_CORES)

    @property
    def is_disturbed(self) -> bool:
        """Whether others took more than `MAX_FOREIGN_SHARE`."""
        return self.foreign_share > MAX_FOREIGN_SHARE

    def _now(self) -> tuple[float, float, float]:
        own = sum(map(process_busy_s, self.pids))
        return time.perf_counter(), machine_busy_s(), own


def wait_idle(pids: Iterable[int] = (), num_looks: int = 2, patience_s: float = 3600.0) -> float:
    """Wait until nobody but `pids` works for `num_looks` looks in a row; seconds waited, told when it was long."""
    started = told = time.monotonic()
    quiet = 0
    while quiet < num_looks:
        with Watch(pids) as watch:
            time.sleep(LOOK_S)
        quiet = 0 if watch.is_disturbed else quiet + 1
        now = time.monotonic()
        if not quiet and now - told > 15.0:
            told = now
            print(
                f"  waiting for an idle machine: others take {watch.foreign_share:.0%}", flush=True
            )
        if now - started > patience_s:
            raise TimeoutError(
                f"the machine was never idle in {patience_s:.0f} s: others take {watch.foreign_share:.0%}"
            )
    return time.monotonic() - started
