"""The launcher with scripted engines: up, served, down without a trace; deaths, refusals, ports."""

import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from services.cluster.ports import KEEPS_PORTS
from tests.support.fake_cluster import FakeCluster, fake_cluster, wait_until
from tests.support.fake_engine import expected_token

pytestmark = pytest.mark.e2e


def ask(cluster: FakeCluster, max_tokens: int = 4) -> httpx.Response:
    body = {"model": "fake", "prompt": "t1 t2 t3", "max_tokens": max_tokens}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=20)


def assert_served(cluster: FakeCluster) -> None:
    reply = ask(cluster)
    assert reply.status_code == 200, reply.text
    expected = " ".join(f"t{expected_token((1, 2, 3), index)}" for index in range(4))
    assert reply.json()["choices"][0]["text"].strip() == expected


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the cluster, and nobody else on this machine, keeps what it needs while it runs."""
    with tempfile.TemporaryDirectory(
        prefix="baton-"
    ) as folder:  # short, as addresses of sockets must be
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def workers(cluster: FakeCluster) -> list[psutil.Process]:
    """Worker fronts: the parents of the scripted engines."""
    engines = [p for p in cluster.family() if "fake_engine.py" in " ".join(p.cmdline())]
    return sorted((engine.parent() for engine in engines), key=lambda process: process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_served_and_down_without_a_trace(number: signal.Signals, own_folder: Path) -> None:
    with fake_cluster() as cluster:
        assert_served(cluster)
        assert [path for path in own_folder.iterdir() if "valkey" in path.name] != []
        family = cluster.family()
        assert len(family) == 6  # index, gateway, two fronts, two engines
        assert cluster.stop(number) == 0
        assert [p for p in family if p.is_running()] == []
        assert [path for path in own_folder.iterdir() if "valkey" in path.name] == []
        text = "\n".join(cluster.lines)
        assert "curl http://127.0.0.1" in text
        assert "Stop it with Ctrl-C" in text


def test_a_launcher_that_is_killed_takes_its_children_along() -> None:
    with fake_cluster() as cluster:
        assert_served(cluster)
        family = cluster.family()
        index = next(p for p in family if "valkey-server" in p.name())
        folder = index.cwd()
        cluster.process.kill()
        wait_until(lambda: not any(p.is_running() for p in family), 15)
        assert [p.cmdline() for p in family if p.is_running()] == []
        shutil.rmtree(folder)  # nobody was left to do it: the kernel ends processes, not folders


def test_ctrl_c_reaches_the_launcher_alone() -> None:
    with fake_cluster() as cluster:
        assert_served(cluster)
        groups = {os.getpgid(process.pid) for process in cluster.family()}
        assert os.getpgid(cluster.process.pid) not in groups


@pytest.mark.failure_edge("worker killed")
def test_a_killed_worker_is_reported_and_comes_back_at_its_address() -> None:
    with fake_cluster() as cluster:
        assert_served(cluster)
        address = cluster.wait_for("decode-1: 127.0.0.1:").split()[2].rstrip(",")
        for count in (1, 2):
            before = {process.pid for process in workers(cluster)}
            for worker in workers(cluster):
                worker.kill()
            for name in ("prefill-1", "decode-1"):
                cluster.wait_for(f"{name} died (SIGKILL); starting it again in", count)
                cluster.wait_for(f"{name} serves again", count)
            wait_until(lambda: ask(cluster).status_code == 200)
            assert_served(cluster)
            assert not before & {process.pid for process in workers(cluster)}
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))):
            pass
        assert cluster.stop() == 0


@pytest.mark.skipif(not KEEPS_PORTS, reason="this system keeps no ports")
def test_a_port_of_a_dead_worker_is_kept_for_it() -> None:
    with fake_cluster() as cluster:
        assert_served(cluster)
        printed = cluster.wait_for("decode-1: 127.0.0.1:")
        metrics_port = int(re.findall(r"127\.0\.0\.1:(\d+)", printed)[1])
        for worker in workers(cluster):
            worker.kill()
        cluster.wait_for("decode-1 died (SIGKILL); starting it again in")
        # Nobody has ever connected to it: no rest of a connection keeps others away.
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", metrics_port))
        cluster.wait_for("decode-1 serves again")
        assert httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").status_code == 200
        assert cluster.stop() == 0


@pytest.mark.failure_edge("engine killed")
def test_a_dead_engine_takes_its_worker_along_and_both_come_back() -> None:
    with fake_cluster("--mixed", "1") as cluster:
        assert_served(cluster)
        (worker,) = workers(cluster)
        worker.children()[0].kill()
        cluster.wait_for("mixed-1 died (exit status 3); starting it again")
        cluster.wait_for("mixed-1 serves again")
        wait_until(lambda: ask(cluster).status_code == 200)
        assert_served(cluster)


def test_a_dead_gateway_comes_back_on_the_same_port() -> None:
    with fake_cluster("--mixed", "1") as cluster:
        assert_served(cluster)
        ours = {process.pid for process in workers(cluster)}
        gateways = [
            process
            for process in cluster.family()
            if "services.cluster.child" in " ".join(process.cmdline()) and process.pid not in ours
        ]
        gateways[0].kill()
        cluster.wait_for("gateway died (SIGKILL); starting it again")
        wait_until(lambda: ask(cluster).status_code == 200)  # never refused: the listener stays
        assert_served(cluster)
        assert cluster.stop() == 0


def test_a_model_that_cannot_be_loaded_is_one_sentence_and_status_1() -> None:
    with fake_cluster(engine=("--fail", "model x: shard 2 of 3 is missing")) as cluster:
        assert cluster.process.wait(30) == 1
        wait_until(lambda: "baton: model x: shard 2 of 3 is missing" in cluster.lines, 5)
        assert cluster.lines.count("baton: model x: shard 2 of 3 is missing") == 1
        assert cluster.family() == [] if cluster.is_running else True


def test_a_port_in_use_is_one_sentence_and_nothing_was_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with fake_cluster("--port", str(port)) as cluster:
            assert cluster.process.wait(30) == 1
            wait_until(lambda: len(cluster.lines) > 0, 5)
            expected = f"baton: --port: {port} on 127.0.0.1 cannot be bound: it is in use"
            assert cluster.lines[-1].startswith(expected)
            assert not any("loading" in line for line in cluster.lines)


def test_verbose_shows_log_lines_and_quiet_does_not() -> None:
    with fake_cluster("--mixed", "1", "--verbose") as cluster:
        cluster.wait_for("mixed-1 | ")
        cluster.wait_for("gateway | ")
    with fake_cluster("--mixed", "1") as cluster:
        cluster.wait_for("Baton serves")
        assert not any(" | " in line for line in cluster.lines)


def test_a_stop_while_loading_is_obeyed() -> None:
    with fake_cluster(engine=("--load-ms", "20000")) as cluster:
        cluster.wait_for("loading nothing", 2)
        family = cluster.family()
        assert cluster.stop() == 0
        assert [p for p in family if p.is_running()] == []
