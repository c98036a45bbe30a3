"""Real processes of a cluster, each started as a user would start it: `baton gateway`, `baton prefill` and so on.

Addresses are held for as long as the cluster, so that a node that is killed comes back where it was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from services.cluster.ports import HeldPort
from tests.support.oracle import demo_model_path

MODEL_NAME = "demo"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0


def wait_until(
    done: Callable[[], bool],
    what: str,
    timeout_s: float = 60.0,
    state: Callable[[], str] = str,
) -> None:
    """Poll until `done`, or fail saying what did not come and how things stand."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what} {state()}"
        time.sleep(0.02)


@dataclass
class Node:
    """One process and its log. Killed with its children at the end, whatever it is doing."""

    name: str
    arguments: list[str]
    health_url: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; `wait_ready` says when it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.cli.main", *self.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_healthy(self) -> bool:
        """Whether it says of itself that it serves."""
        try:
            return httpx.get(self.health_url, timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self) -> None:
        """Wait until it serves."""

        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} ended: {self.log.read_text()[-2000:]}"
            return self.is_healthy()

        wait_until(ready, f"{self.name} serves", START_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL to the front alone: its engine must follow by itself."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM and the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            self._sweep()

    def _sweep(self) -> None:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def metrics(self, label: str = "") -> dict[str, float]:
        """Every sample of a worker's /metrics by name, summed over labels; label: only samples that bear it."""
        samples: dict[str, float] = {}
        url = self.health_url.replace("/health", "/metrics")
        for line in httpx.get(url, timeout=5.0).text.splitlines():
            if line and not line.startswith("#") and label in line:
                name = line.partition("{")[0].partition(" ")[0]
                samples[name] = samples.get(name, 0.0) + float(line.rpartition(" ")[2])
        return samples

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens that this worker has computed itself."""
        samples = self.metrics('source="local_compute"')
        return int(samples.get("vllm:prompt_tokens_by_source_total", 0))


@dataclass
class Cluster:
    """A gateway and its workers, by name."""

    gateway: Node
    workers: dict[str, Node] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where clients go."""
        return self.gateway.health_url.removesuffix("/health")

    def wait_routable(self) -> None:
        """Wait until the gateway knows every worker."""

        def known() -> bool:
            try:
                body = httpx.get(f"{self.url}/health", timeout=2.0).json()
            except (httpx.HTTPError, ValueError):
                return False
            return sum(bool(worker["live"]) for worker in body["workers"]) == len(self.workers)

        wait_until(known, "the gateway knows every worker", START_TIMEOUT_S)

    def wait_idle(self) -> None:
        """Wait until no worker holds or awaits anything."""
        wait_until(
            lambda: all(not busy_gauges(worker) for worker in self.workers.values()),
            "all gauges idle",
            30.0,
            lambda: str({name: busy_gauges(worker) for name, worker in self.workers.items()}),
        )


IDLE_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "baton:arriving_sequences",
    "baton:loading_sequences",
    "baton:held_blocks",
    "baton:open_sessions",
    "baton:open_requests",
    "baton:open_prefill_streams",
    "baton:live_permits",
    "baton:quarantined_blocks",
    "baton:blocks_outstanding",
    "baton:integrity_violations_total",
)


def busy_gauges(worker: Node) -> dict[str, float]:
    """The gauges of a worker that are not at rest."""
    metrics = worker.metrics()
    return {name: metrics[name] for name in IDLE_GAUGES if metrics[name]}


@contextmanager
def run_cluster(
    folder: Path,
    roles: dict[str, str],
    *,
    redis_url: str = "",
    worker_arguments: list[str] | None = None,
    own_arguments: dict[str, list[str]] | None = None,
    gateway_arguments: list[str] | None = None,
    threads: int = 1,
) -> Iterator[Cluster]:
    """Start `roles` (worker name -> role) and a gateway that has every worker as a seed; stop all at the end.

    own_arguments: more arguments of some workers, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = ["--redis-url", redis_url] if redis_url else []
    workers: dict[str, Node] = {}
    seeds: list[str] = []
    with ExitStack() as stack:
        for name, role in roles.items():
            port, metrics_port = _hold_port(stack), _hold_port(stack)
            arguments = [role, str(demo_model_path()), "--served-model-name", MODEL_NAME]
            arguments += ["--port", str(port), "--metrics-port", str(metrics_port)]
            arguments += ["--worker-id", name, "--num-threads", str(threads), *index]
            arguments += [*(worker_arguments or []), *(own_arguments or {}).get(name, [])]
            health = f"http://127.0.0.1:{metrics_port}/health"
            workers[name] = Node(name, arguments, health, folder / f"{name}.log")
            seeds.append(f"127.0.0.1:{port}")
        port = _hold_port(stack)
        arguments = ["gateway", "--port", str(port), "--seed", *seeds, *index]
        arguments += gateway_arguments or []
        health = f"http://127.0.0.1:{port}/health"
        gateway = Node("gateway", arguments, health, folder / "gateway.log")
        for node in (*workers.values(), gateway):
            node.start()
            stack.callback(node.stop)
        for node in (*workers.values(), gateway):
            node.wait_ready()
        cluster = Cluster(gateway, workers)
        cluster.wait_routable()
        yield cluster


def _hold_port(stack: ExitStack) -> int:
    held = HeldPort()
    stack.callback(held.close)
    return held.port
