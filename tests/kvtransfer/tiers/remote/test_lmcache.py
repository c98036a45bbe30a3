"""Stores and tiers over a real LMCache server, with the package in a folder of its own (`make test-system`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import install

ROOT = Path(__file__).parents[4]
SUITES = ROOT / "tests/kvtransfer/tiers"


@pytest.mark.system
@pytest.mark.timeout(900)
def test_the_contracts_hold_over_an_lmcache_server() -> None:
    packages = install.lmcache()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-k", "lmcache", "-m", "not system", str(SUITES)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    summary = next(line for line in reversed(done.stdout.splitlines()) if " passed" in line)
    assert "skipped" not in summary
