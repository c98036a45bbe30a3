"""The cores of this machine, shared by the workers on it.

A ledger is a small file that all workers of one user map. Each holds a slot while it lives and tells there whether it
computes; from the slots it reads how many cores it has: all that no other worker computes on, at least one. The rules
are in `native/ledger.h`. A worker that ends, however it does, takes its claim with it; the last one removes the file.
Where that one was killed,

    python -m kernels.cpu.ledger NAME

removes the file, if nobody uses it; so does the next worker when it ends.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from core.errors import ConfigError
from kernels.cpu.binding import find_library, library

AUTO, NONE = "auto", "none"
_FOLDER = Path("/dev/shm")
_VERSION = 1
_REASON_BYTES = 256
_LOOK_S = 0.01


def ledger_path(name: str) -> Path | None:
    """The file that `--core-ledger` means; None for none.

    `auto`: one for each user and set of cores, since workers pinned to other cores have nothing to share.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return Path(name)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    digest = hashlib.sha256(cores.encode()).hexdigest()[:8]
    return _FOLDER / f"baton-cores-{_VERSION}-{os.geteuid()}-{digest}"


class CoreLedger:
    """One worker's slot, taken on construction."""

    def __init__(self, path: Path, num_threads: int, num_cores: int = 0) -> None:
        """num_threads: most cores that this worker can use. num_cores: cores to share; 0 for this process's.

        Raises ConfigError with the reason where the file cannot be used.
        """
        native = library()
        reason = ctypes.create_string_buffer(_REASON_BYTES)
        self.path = path
        self.handle: int = native.baton_ledger_open(
            os.fsencode(path), num_cores or num_usable_cores(), num_threads, reason, _REASON_BYTES
        )
        if not self.handle:
            raise ConfigError(f"--core-ledger: {path}: {reason.value.decode()}")
        self._native = native
        self._close = weakref.finalize(self, native.baton_ledger_close, self.handle)

    @property
    def grant(self) -> int:
        """Cores of this worker now, if it computes."""
        granted: int = self._native.baton_ledger_grant(self.handle)
        return granted

    def claim(self) -> None:
        """This worker computes. A team does this by itself for as long as a program runs."""
        self._native.baton_ledger_claim(self.handle)

    def release(self) -> None:
        """It computes no more."""
        self._native.baton_ledger_release(self.handle)

    def close(self) -> None:
        """Give the slot back. No team may use it any more."""
        self._close()


@contextmanager
def alone(name: str, wait_s: float) -> Iterator[bool]:
    """One worker of a ledger at a time is inside: what it times there is not its share beside others that time theirs.

    name: of the ledger; without one nobody waits. Whoever has waited for `wait_s` goes in beside the other; whether it
    is alone. A worker that ends, however it does, is out. Workers know each other in one network namespace only, and by
    the same path.
    """
    path = ledger_path(name)
    with ExitStack() as stack:
        yield path is not None and _wait_for_name(stack, path, wait_s)


def _wait_for_name(stack: ExitStack, path: Path, wait_s: float) -> bool:
    """Whether the name of who is alone is ours within the time, until the stack is closed. An abstract one: it goes
    with its process, and is refused where there is no such thing.
    """
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    deadline_s = time.monotonic() + wait_s
    try:
        mark = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        while True:
            try:
                mark.bind(f"\0baton-alone-{digest}")
                return True
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline_s:
                    return False
            time.sleep(_LOOK_S)
    except (OSError, AttributeError):
        return False


def sweep(name: str) -> None:
    """Remove a ledger that no worker uses: one whose workers were killed."""
    path = ledger_path(name)
    if path is not None and path.exists() and find_library() is not None:
        library().baton_ledger_sweep(os.fsencode(path))


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sweep(sys.argv[1])
