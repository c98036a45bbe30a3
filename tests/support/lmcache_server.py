"""A real LMCache server for tests, which ends with the process that started it.

Run as a program it is that server: `lmcache_server HOST PORT cpu` with two additions. The kernel kills it with its
parent, and its address can be taken again at once after it was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from services.cluster.ports import HeldPort

IS_INSTALLED = importlib.util.find_spec("lmcache") is not None
_START_TIMEOUT_S = 60.0
_ROOT = Path(__file__).parents[2]


class LMCacheServer:
    """One server at one address. It is not running until `start`."""

    def __init__(self) -> None:
        self._held = HeldPort()
        self.port = self._held.port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Return when it answers; it holds nothing."""
        command = [sys.executable, "-m", "tests.support.lmcache_server", str(os.getpid())]
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        self._process = subprocess.Popen(
            [*command, "127.0.0.1", str(self.port), "cpu"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._accepts():
            assert self._process.poll() is None, f"it ended with {self._process.returncode}"
            assert time.monotonic() < deadline_s, "it does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """As a crash would. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Kill it for good."""
        self.kill()
        self._held.close()

    def pause(self) -> None:
        """Its address still accepts connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # its threads stop one after the other

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _accepts(self) -> bool:
        with contextlib.suppress(OSError):
            with socket.create_connection(("127.0.0.1", self.port), 1.0):
                return True
        return False


class _ReusableSocket(socket.socket):
    def bind(self, address: object) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        super().bind(address)  # type: ignore[arg-type]


def _main(parent: int, *arguments: str) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process is already gone")
    socket.socket = _ReusableSocket  # type: ignore[misc]
    sys.argv = ["lmcache_server", *arguments]
    from lmcache.v1.server.__main__ import main

    main()


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:])
