"""A local cluster with scripted engines, run as a program as `baton up` is, and watched from a
test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import psutil

ROOT = Path(__file__).resolve().parents[2]


def run() -> int:
    """The program: options of the fake engine, then `--`, then settings of the cluster."""
    sys.path[0] = str(ROOT)  # instead of this folder, whose names must not hide packages
    from services.cli.main import _Parser
    from services.cluster.launcher import launch
    from services.cluster.words import Words
    from services.config import build
    from services.config.sources import add_flags, collect
    from tests.support import fake_engine

    split = sys.argv.index("--")
    parser = _Parser()
    add_flags(parser, build.cluster_settings())
    namespace = parser.parse_args(["--model", "fake", *sys.argv[split + 1 :]])
    config = build.build_cluster(collect(build.cluster_settings(), namespace, {}), {})
    command = fake_engine.command(*sys.argv[1:split])
    return launch(config, Words(verbose=config.verbose), command)


@dataclass
class FakeCluster:
    """The launcher as a child of the test, and what it prints."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)

    def wait_for(self, text: str, count: int = 1, seconds: float = 30.0) -> str:
        """The line that holds the text for the count-th time."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        wait_until(lambda: len(found()) >= count or not self.is_running, seconds)
        assert len(found()) >= count, f"{text!r} did not come; there is: {self.lines}"
        return found()[count - 1]

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def url(self) -> str:
        words = self.wait_for("Baton serves").split()
        return next(word for word in words if word.startswith("http://"))

    def family(self) -> list[psutil.Process]:
        """The launcher's children and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, *words: str) -> psutil.Process:
        """The worker front (or gateway) whose standard output the launcher reads, by its engine or
        port.
        """
        found = [p for p in self.family() if all(word in " ".join(p.cmdline()) for word in words)]
        assert found, words
        return found[0]

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 30.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)


@contextmanager
def fake_cluster(*settings: str, engine: tuple[str, ...] = ()) -> Iterator[FakeCluster]:
    """Start a cluster; whatever is left of it at the end of the block is killed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "PORT"))}
    process = subprocess.Popen(
        [sys.executable, __file__, *engine, "--", "--port", "0", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    cluster = FakeCluster(process)
    reader = Thread(target=cluster.read, daemon=True)
    reader.start()
    try:
        yield cluster
    finally:
        family = cluster.family() if cluster.is_running else []
        process.kill()
        process.wait()
        for left in family:
            if left.is_running():
                left.kill()
        reader.join(5)
        assert process.stdout is not None
        process.stdout.close()


if __name__ == "__main__":
    sys.exit(run())
