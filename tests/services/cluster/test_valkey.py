"""The embedded server: dies with its parent, keeps nothing, comes back on the same address."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from core.errors import ServeError
from services.cluster.valkey import ValkeyServer, start_valkey
from tests.support.valkey import command, running_valkey

ROOT = Path(__file__).parents[3]

PARENT = """
import sys, time
from services.cluster.valkey import start_valkey
server = start_valkey()
print(server.pid, server.url, flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_gone(pid: int, timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def ask(server: ValkeyServer, *words: object) -> object:
    return asyncio.run(command(server, *words))


@pytest.mark.parametrize("port", [None, 0])
def test_it_answers_at_its_url_and_leaves_nothing(port: int | None) -> None:
    server = start_valkey(port=port)
    pid, folder = server.pid, server.socket_path.parent
    assert pid is not None
    assert ask(server, "PING") is True
    assert server.url.startswith("unix://" if port is None else "redis://127.0.0.1:")
    server.stop()
    assert not is_running(pid)
    assert not folder.exists()
    server.stop()


def test_it_keeps_nothing_and_evicts_nothing() -> None:
    with running_valkey() as server:
        for name, value in [("save", ""), ("appendonly", "no"), ("maxmemory-policy", "noeviction")]:
            answer = ask(server, "CONFIG", "GET", name)
            assert answer == {name.encode(): value.encode()}


@pytest.mark.parametrize("port", [None, 0])
def test_it_comes_back_empty_on_the_same_address(port: int | None) -> None:
    with running_valkey(port=port) as server:
        url = server.url
        ask(server, "SET", "key", "value")
        server.kill()
        assert server.pid is None
        server.restart()
        assert server.url == url
        assert ask(server, "GET", "key") is None


def test_a_paused_server_can_be_resumed_and_stopped() -> None:
    with running_valkey() as server:
        server.pause()
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(command(server, "PING"), 0.1))
        server.resume()
        assert ask(server, "PING") is True
        server.pause()
        started_s = time.monotonic()
        server.stop()
        assert time.monotonic() - started_s < 4


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent_and_the_next_start_sweeps_its_folder(
    with_signal: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed parent cannot tidy its folder
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[0])
        assert is_running(pid)
        os.kill(parent.pid, with_signal)
        parent.wait(5)
        assert until_gone(pid)
        (left,) = tmp_path.iterdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with running_valkey() as first, running_valkey() as second:
            used = {first.socket_path.parent, second.socket_path.parent}
            assert set(tmp_path.iterdir()) == used
            assert left not in used
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(ServeError, match=r"did not start: .*no-such-option"):
        start_valkey(options=("--no-such-option", "1"))
    with running_valkey(port=0) as server:
        with pytest.raises(ServeError, match=r"did not start: .*(in use|Failed listening)"):
            start_valkey(port=server.port)


def test_a_given_port_is_taken(held_port: int) -> None:
    with running_valkey(port=held_port) as server:
        assert server.url == f"redis://127.0.0.1:{held_port}"
