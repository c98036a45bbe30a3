"""`baton up`, as `make serve` runs it: Paris through the official SDK, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from kernels.cpu.binding import find_library
from services.cluster.ports import HeldPort
from tests.support.nodes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Up:
    """One `baton up`."""

    def __init__(self, log: Path) -> None:
        self._held = HeldPort()
        self.port = self._held.port
        self._log = log
        # Its own: other workers on this machine use the one that all share.
        self.ledger = Path("/dev/shm") / f"baton-test-cores-{self.port}"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "services.cli.main", "up"),
                    *("--port", str(self.port), "--core-ledger", str(self.ledger)),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def close(self) -> None:
        """Nothing of it is left, however far it came."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.ledger.unlink(missing_ok=True)
        self._held.close()

    @property
    def text(self) -> str:
        return self._log.read_text()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def listener(self, worker: str) -> psutil.Process:
        """The front of a worker: the process that listens at the address the launcher has printed."""
        found = re.search(rf"{worker}: 127\.0\.0\.1:(\d+)", self.text)
        assert found is not None, self.text
        port = int(found.group(1))
        return next(
            process
            for process in self.family()
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        )


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    started = Up(tmp_path / "up.log")
    try:
        wait_until(lambda: "Stop it with Ctrl-C" in started.text, "baton up is up", 90.0)
        yield started
    finally:
        started.close()


def shared_memory() -> set[str]:
    """What lies there, but for the ledger of workers that run on this machine anyway."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("baton-cores-")}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_paris_streaming_and_not_then_nothing_is_left(tmp_path: Path, end: signal.Signals) -> None:
    segments = shared_memory()
    started = Up(tmp_path / "up.log")
    try:
        wait_until(lambda: "Stop it with Ctrl-C" in started.text, "baton up is up", 90.0)
        assert f"http://127.0.0.1:{started.port}" in started.text
        assert "curl " in started.text
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{started.port}/v1", api_key="unused")
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
        assert "Paris" in whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "stop"
        with client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, stream=True
        ) as chunks:
            deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert len(deltas) > 3, "it came in pieces"
        assert "".join(deltas) == whole.choices[0].message.content
        family = started.family()
        assert started.ledger.exists() == (find_library() is not None), "workers share the cores"
        assert len(family) >= 6, "valkey, gateway, two fronts, two engines"
        started.process.send_signal(end)
        assert started.process.wait(20.0) == 0
        _, alive = psutil.wait_procs(family, timeout=3.0)
        assert not alive
        assert shared_memory() == segments
    finally:
        started.close()


def test_a_killed_launcher_takes_everything_with_it(up: Up) -> None:
    family = up.family()
    up.process.kill()
    _, alive = psutil.wait_procs(family, timeout=5.0)
    assert not alive


def test_a_killed_worker_comes_back_and_serves(up: Up) -> None:
    model = "SmolLM2-135M-Instruct"
    up.listener("decode-1").kill()
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{up.port}/v1", api_key="unused", max_retries=0
    )

    def answers() -> bool:
        try:
            answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
        except openai.APIError:
            time.sleep(0.2)
            return False
        return "Paris" in (answer.choices[0].message.content or "")

    wait_until(answers, "the decode worker is back", 60.0)
