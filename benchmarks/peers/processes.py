"""A server process with its descendants: started, stopped in its tracks, woken, weighed, ended.

All servers of a run live side by side, and all but the measured one are held by SIGSTOP: a stopped process takes no
processor time, and nothing is loaded anew between rounds. The benchmark's end, also by a signal, ends them all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.idle import tree
from benchmarks.peers.shared_machine import step_back

STOP_TIMEOUT_S = 15.0
_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG


_THREADING = ("OMP_", "KMP_", "GOMP_", "MKL_")
"""How the names of settings begin by which thread pools are tuned."""


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without our own choices for thread pools: each peer waits and spins as its makers left it.

    What suits several of our workers on few cores (passive waiting) costs others most of their speed.
    """
    return {name: value for name, value in environment.items() if not name.startswith(_THREADING)}


class ServerDiedError(RuntimeError):
    """A server ended by itself; the message carries the end of its log."""


class ServerProcess:
    """One server and its log."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        has_pipes: bool = False,
    ) -> None:
        self.name = name
        self._log = log
        pipe = subprocess.PIPE if has_pipes else subprocess.DEVNULL
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                list(command),
                stdin=pipe,
                stdout=pipe if has_pipes else output,
                stderr=output,
                env={**inherited(os.environ), **environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - system calls only, no locks
            )

    @property
    def pids(self) -> list[int]:
        """The server's processes now."""
        return tree(self.popen.pid)

    def check_alive(self) -> None:
        """Raise when it has ended."""
        if self.popen.poll() is not None:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise ServerDiedError(f"{self.name} ended with {self.popen.returncode}: {tail}")

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll until it is ready."""
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            self.check_alive()
            if time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise TimeoutError(f"{self.name} is not ready after {timeout_s:.0f} s: {tail}")
            time.sleep(0.1)

    def pause(self) -> None:
        """Stop every process where it stands."""
        _signal_all(self.pids, signal.SIGSTOP)

    def resume(self) -> None:
        """Let every process go on, children before their parents."""
        _signal_all(reversed(self.pids), signal.SIGCONT)

    def stop(self) -> None:
        """End all processes: asked first, then killed."""
        born = {pid: _birth(pid) for pid in self.pids}
        self.resume()
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                stream.close()
        # A number that was given to another process since then is not ours to kill.
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while left := [pid for pid, at in born.items() if at and _birth(pid) == at]:
            _signal_all(left, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: processes {left} outlive SIGKILL")
            time.sleep(0.02)

    def pss_bytes(self) -> dict[str, int]:
        """Proportional set size of each process, by `pid command`: shared pages are split among who shares them."""
        return {f"{pid} {_title(pid)}": pss_bytes(pid) for pid in self.pids}


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process, 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _birth(pid: int) -> str:
    """When a process started, in ticks since boot; empty when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _title(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return "?"
    return " ".join(Path(word.decode(errors="replace")).name for word in words[:5]).strip()


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _die_with_parent() -> None:
    """In the child, before the program starts: SIGKILL when the benchmark dies; the priority of servers."""
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)
    step_back()
