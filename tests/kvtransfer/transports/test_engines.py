"""The contract over the packages of transfer engines, each from a folder of its own (`make test-system`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from benchmarks.peers import install
from tests.kvtransfer.harness import ENGINES

ROOT = Path(__file__).parents[3]
SUITES = [
    *(
        Path(__file__).with_name(f"test_{name}.py")
        for name in ("contract", "schedules", "engine_ends")
    ),
    ROOT / "tests/engine/remote/test_transports.py",
]

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

Run = tuple[subprocess.Popen[bytes], IO[str]]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Run]]:
    """The suites over all of them at once: Mooncake takes a second to close an end, and no core."""
    with tempfile.TemporaryDirectory() as folder:
        started = {kind: _start(kind, Path(folder) / kind) for kind in ENGINES}
        try:
            yield started
        finally:
            for process, output in started.values():
                process.kill()
                process.wait()
                output.close()


def _start(kind: str, log: Path) -> Run:
    packages = install.transfer_engine(kind)
    suites = map(str, SUITES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", kind, *suites]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"}
    output = log.open("w+")
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
    )
    return process, output


@pytest.mark.parametrize("kind", ENGINES)
def test_the_contract_holds_over_the_package(runs: dict[str, Run], kind: str) -> None:
    process, output = runs[kind]
    status = process.wait()
    output.seek(0)
    said = output.read()
    assert status == 0, said[-8000:]
    summary = next(line for line in reversed(said.splitlines()) if " passed" in line)
    assert "skipped" not in summary
