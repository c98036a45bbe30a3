"""For a machine that others work on too: take turns with them by a lock, and keep them off the cores while measuring.

Both are off by default: an idle machine needs neither.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

SERVER_PRIORITY, CLIENT_PRIORITY = 1, 2
"""Of SCHED_RR. The client must interrupt servers whose threads spin, or it would wait for the end of their slice."""


def go_realtime() -> None:
    """Run this process, and what it starts, before all ordinary processes; needs the right to (root has it)."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(CLIENT_PRIORITY))


def is_realtime() -> bool:
    """Whether `go_realtime` was called in this process or a parent."""
    return os.sched_getscheduler(0) == os.SCHED_RR


def step_back() -> None:
    """In a server before it starts: below the client, where the client is a realtime process."""
    if is_realtime():
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(SERVER_PRIORITY))


@contextmanager
def turn(lock_path: str) -> Iterator[None]:
    """Hold an advisory lock on a file that others lock while they measure; no path: nothing to hold."""
    if not lock_path:
        yield
        return
    with open(lock_path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
