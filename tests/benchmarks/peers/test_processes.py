"""Servers held and ended, and what the watch counts as somebody else's."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.idle import Watch, process_busy_s
from benchmarks.peers.processes import ServerDiedError, ServerProcess, pss_bytes

BUSY = "while True: pass"
PARENT = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'while True: pass']); p.wait()"


def start(program: str, tmp_path: Path) -> ServerProcess:
    return ServerProcess("server", [sys.executable, "-c", program], {}, tmp_path / "log")


def wait_for_child(process: ServerProcess) -> list[int]:
    deadline = time.monotonic() + 10
    while len(process.pids) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process.pids


def test_a_paused_server_and_its_child_take_no_time_and_go_on_after(tmp_path: Path) -> None:
    process = start(PARENT, tmp_path)
    try:
        _, child = wait_for_child(process)
        process.pause()
        held = process_busy_s(child)
        time.sleep(0.2)
        assert process_busy_s(child) == held
        process.resume()
        deadline = time.monotonic() + 10
        while process_busy_s(child) == held:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.stop()
    assert pss_bytes(child) == 0


def test_a_server_stopped_while_paused_leaves_no_child(tmp_path: Path) -> None:
    process = start(PARENT, tmp_path)
    _, child = wait_for_child(process)
    process.pause()
    process.stop()
    assert pss_bytes(child) == 0


def test_a_server_that_ends_by_itself_is_told_with_its_log(tmp_path: Path) -> None:
    process = start("import sys; sys.exit('no such model')", tmp_path)
    with pytest.raises(ServerDiedError, match="no such model"):
        process.wait_until(lambda: False, 10.0)
    process.stop()


def test_a_peer_does_not_inherit_how_our_own_threads_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT", "MKL_NUM_THREADS")
    for name in (*ours, "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    peer = ServerProcess("peer", ["env"], {"OMP_NUM_THREADS": "2"}, tmp_path / "log", True)
    said, _ = peer.popen.communicate(timeout=20)
    given = dict(line.split("=", 1) for line in said.decode().splitlines() if "=" in line)
    assert not given.keys() & set(ours)
    assert (given["OMP_NUM_THREADS"], given["HF_HUB_OFFLINE"]) == ("2", "1")
    assert "PATH" in given


def test_the_watch_takes_away_what_its_own_processes_did() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY]) as burner:
        try:
            time.sleep(0.2)
            with Watch() as blind:
                time.sleep(0.5)
            with Watch([burner.pid]) as seeing:
                time.sleep(0.5)
        finally:
            burner.kill()
    assert blind.foreign_share > seeing.foreign_share + 0.05
