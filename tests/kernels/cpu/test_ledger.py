"""Cores shared by real processes: who gets how many, who lapses, and what becomes of the file.

A worker that claims and then tells no progress counts as stopped after a while; one that `hold`s claims again and
again. Others share this machine and may hold up any of these processes: what must come is waited for.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from core.errors import ConfigError
from kernels.backends import choose_backend
from kernels.cpu.ledger import CoreLedger, alone, ledger_path, num_usable_cores, sweep
from tests.support.ledger_worker import LedgerWorker
from tests.support.nodes import wait_until

SLOT_BYTES, HEADER_BYTES = 64, 128

Start = Callable[..., LedgerWorker]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def one(cores: int = 2, threads: int = 2) -> LedgerWorker:
            worker = LedgerWorker(path, cores, threads)
            stack.callback(worker.end)
            return worker

        yield one


def test_who_computes_alone_has_all_cores_and_two_share_them(start: Start) -> None:
    busy, other = start(), start()
    busy.ask("hold")
    assert busy.grant == 2, "an idle worker counts nothing"
    other.ask("claim")
    wait_until(lambda: (busy.grant, other.grant) == (1, 1), "each has one", 5.0)
    other.ask("release")
    wait_until(lambda: busy.grant == 2, "the core is back", 5.0)


@pytest.mark.parametrize(
    ("cores", "threads", "grants"),
    [
        (2, [2, 2, 2, 2, 2], [1, 1, 1, 1, 1]),
        (8, [8, 8, 8], [3, 3, 2]),
        (8, [1, 8, 8], [1, 4, 3]),
        (8, [2, 8], [2, 6]),
        (3, [8, 1], [2, 1]),
    ],
)
def test_cores_are_dealt_in_turn_and_each_gets_one(
    path: Path, cores: int, threads: list[int], grants: list[int]
) -> None:
    workers = [CoreLedger(path, count, cores) for count in threads]
    for worker in workers:
        worker.claim()
    assert [worker.grant for worker in workers] == grants


def test_a_killed_owners_claim_lapses_and_its_slot_is_used_again(start: Start, path: Path) -> None:
    busy, victim = start(), start()
    victim.ask("hold")
    busy.ask("hold")
    wait_until(lambda: busy.grant == 1, "they share", 5.0)
    victim.end()
    wait_until(lambda: busy.grant == 2, "the dead one's core is free", 5.0)
    start().ask("hold")
    wait_until(lambda: busy.grant == 1, "the next worker in that slot counts", 5.0)
    assert path.read_bytes()[HEADER_BYTES + 2 * SLOT_BYTES :].strip(b"\0") == b""


def test_a_stopped_owner_is_not_waited_for_and_counts_again_when_it_goes_on(start: Start) -> None:
    busy, stopped = start(), start()
    stopped.ask("hold")
    busy.ask("hold")
    wait_until(lambda: busy.grant == 1, "they share", 5.0)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    wait_until(lambda: busy.grant == 2, "a stopped worker gives up its core", 10.0)
    os.kill(stopped.process.pid, signal.SIGCONT)
    wait_until(lambda: busy.grant == 1, "it has it back", 10.0)


def test_threads_without_a_core_sleep(start: Start) -> None:
    one, other = start(), start()
    one.ask("run 0.1")
    other.ask("run 0.1")
    main, helpers = map(float, one.ask("run 0.5").split())
    assert helpers > 0.2 * main, "alone both threads work"
    one.tell("run 1.5")
    other.tell("run 1.5")
    # Each starts and ends alone for a moment; between that its second thread has nothing to do.
    for worker in (one, other):
        main, helpers = map(float, worker.ask().split())
        assert helpers < 0.3 * main


def test_bits_are_equal_whatever_the_grant_does(start: Start) -> None:
    worker, neighbour = start(), start()
    alone = worker.ask("bits")
    neighbour.ask("run 0.01")
    worker.tell("bits")
    for _ in range(30):
        neighbour.ask("run 0.005")
    assert worker.ask() == alone
    assert len(alone.split()) == 1


def test_the_last_to_leave_removes_the_file(path: Path) -> None:
    first, second = CoreLedger(path, 2), CoreLedger(path, 2)
    assert path.stat().st_mode & 0o777 == 0o600
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_what_killed_workers_leave_is_swept_or_taken_over(start: Start, path: Path) -> None:
    start().end()
    assert path.exists()
    subprocess.run([sys.executable, "-m", "kernels.cpu.ledger", str(path)], check=True)
    assert not path.exists()
    victim = start()
    victim.ask("claim")
    sweep(str(path))
    assert path.exists(), "it is in use"
    victim.end()
    alone = CoreLedger(path, 2, 2)
    alone.claim()
    assert alone.grant == 2
    alone.close()
    assert not path.exists()


def stale(version: int, num_slots: int = 256) -> bytes:
    """A ledger whose slots all claim to compute, as a machine that lost power would leave it."""
    head = b"BATONCOR" + struct.pack("<IIi", version, num_slots, 256)
    return head.ljust(HEADER_BYTES, b"\1") + struct.pack("<qIi", 2**63 - 1, 5, 8).ljust(64) * 256


@pytest.mark.parametrize("content", [stale(1), stale(0), stale(1)[:70], b"BATO", b""])
def test_a_stale_file_is_taken_over(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    one, other = CoreLedger(path, 2, 2), CoreLedger(path, 2, 2)
    one.claim()
    assert one.grant == 2
    other.claim()
    assert (one.grant, other.grant) == (1, 1)


def test_what_is_no_ledger_is_left_alone(path: Path) -> None:
    path.write_text("a letter")
    with pytest.raises(ConfigError, match=r"--core-ledger: .*cores: it is no core ledger"):
        CoreLedger(path, 2)
    assert path.read_text() == "a letter"
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(ConfigError, match=r"--core-ledger: .*link: "):
        CoreLedger(link, 2)
    with pytest.raises(ConfigError, match=r"--core-ledger: .*below: Not a directory"):
        CoreLedger(path / "below", 2)


def test_a_file_in_use_by_another_version_is_refused(start: Start, path: Path) -> None:
    start()
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 7))
    with pytest.raises(ConfigError, match="workers of another version of Baton use it"):
        CoreLedger(path, 2)


def test_a_full_ledger_says_so(path: Path) -> None:
    workers = [CoreLedger(path, 1) for _ in range(256)]
    with pytest.raises(ConfigError, match="all of its slots are taken: 256"):
        CoreLedger(path, 1)
    for worker in workers:
        worker.claim()
    assert {worker.grant for worker in workers} == {1}
    workers[3].close()
    assert CoreLedger(path, 1).grant == 1


def test_names_mean_files() -> None:
    assert ledger_path("none") is None
    assert ledger_path("/x/y") == Path("/x/y")
    own = ledger_path("auto")
    assert own is not None
    assert own.parent == Path("/dev/shm")
    pinned = "import os; os.sched_setaffinity(0, {0}); from kernels.cpu.ledger import ledger_path"
    other = subprocess.run(
        [sys.executable, "-c", pinned + "; print(ledger_path('auto'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert (other == str(own)) == (os.sched_getaffinity(0) == {0}), "other cores, another ledger"


def test_a_backend_has_all_cores_of_a_ledger_and_one_without(path: Path) -> None:
    shared = choose_backend("cpu", "float32", 0, core_ledger=str(path))
    assert f"{num_usable_cores()} threads of shared cores)" in shared.description
    assert "1 threads)" in choose_backend("cpu", "float32", 0, core_ledger="none").description
    with pytest.raises(ConfigError, match="--core-ledger: "):
        choose_backend("cpu", "float32", 0, core_ledger="/nowhere/cores")


STAYS_ALONE = """
import sys, time
from kernels.cpu.ledger import alone
with alone(sys.argv[1], 0.0) as is_alone:
    print(is_alone, flush=True)
    time.sleep(60)
"""


def test_one_worker_at_a_time_is_alone_and_a_killed_one_is_not_waited_for(path: Path) -> None:
    name, other = str(path), str(path) + "-other"
    with alone(name, 0.0) as first, alone(other, 0.0) as on_another, alone(name, 0.05) as second:
        assert (first, on_another, second) == (True, True, False)
    with subprocess.Popen([sys.executable, "-c", STAYS_ALONE, name], stdout=subprocess.PIPE) as one:
        try:
            assert one.stdout is not None
            assert one.stdout.readline() == b"True\n"
            with alone(name, 0.0) as beside:
                assert not beside
        finally:
            one.kill()
        with alone(name, 20.0) as afterwards:
            assert afterwards
    assert not path.exists(), "it needs no ledger, and makes none"


def test_without_a_ledger_nobody_waits() -> None:
    with alone("none", 60.0) as first, alone("none", 60.0) as second:
        assert (first, second) == (False, False)
