"""The contract over the packages of transfer engines, each from a folder of its own (`make test-system`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import install
from tests.kvtransfer.harness import ENGINES

ROOT = Path(__file__).parents[3]
SUITES = ("test_contract.py", "test_schedules.py", "test_engine_ends.py")


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ENGINES)
def test_the_contract_holds_over_the_package(kind: str) -> None:
    folder = install.transfer_engine(kind)
    suites = [str(Path(__file__).with_name(name)) for name in SUITES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", kind, *suites]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:]
    summary = done.stdout.splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
