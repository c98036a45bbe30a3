"""A child process that ends with its parent, whatever happens to either."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGTERM when the thread that started this process is gone; raise
    SystemExit if it is already.

    SIGTERM, not SIGKILL: an orphan still leaves the index and ends its streams, as when it is asked
    to stop.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise SystemExit("the process that started this one is already gone")
