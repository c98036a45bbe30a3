"""What a run of the tests says of itself.

A failed test is named, whatever is collected while its report is written. Threads that are left running fail the run,
also where a worker of several had them.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Fails while every collection finds garbage whose finalizer parses and leaves more of the kind.
FAILING = """
import ast
import gc


def parse(frames):
    return parse(frames - 1) if frames else ast.parse("a + b * (c - d)")


class Parsing:
    def __init__(self):
        self.itself = self

    def __del__(self):
        parse(50)
        Parsing()


def test_named():
    Parsing()
    gc.set_threshold(20, 2, 2)
    raise AssertionError("the one that failed")


""" + "\n".join(f"def filler_{n}(a, b):\n    return (a + b) * [a, b, {n}][0]\n" for n in range(300))

# Passes, and leaves a thread that never ends.
LEAVING = """
import threading


def test_leaving():
    threading.Thread(target=threading.Event().wait, name="{name}", daemon={daemon}).start()
"""


def test_a_failure_is_reported_while_finalizers_parse(tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING)
    run = run_pytest(tmp_path)
    assert "FAILED" in run.stdout, run.stdout + run.stderr
    assert "test_named" in run.stdout
    assert "INTERNALERROR" not in run.stdout + run.stderr
    assert run.returncode == 1


@pytest.mark.parametrize("workers", ["0", "1", "2"])
@pytest.mark.parametrize(("name", "status"), [("kv-send", 1), ("other", 0)])
def test_movers_left_running_fail_the_run(tmp_path, workers, name, status):
    """Whose tests pass; only movers do, and no worker of another file hides it."""
    (tmp_path / "test_leaving.py").write_text(LEAVING.format(name=name, daemon=name == "other"))
    (tmp_path / "test_tidy.py").write_text("def test_tidy():\n    pass\n")
    options = [] if workers == "0" else ["-n", workers, "--dist", "loadfile"]
    run = run_pytest(tmp_path, *options)
    assert "2 passed" in run.stdout, run.stdout + run.stderr
    assert run.returncode == status
    assert ("left running: kv-send" in run.stderr) == (name == "kv-send")


def run_pytest(folder, *options):
    """The tests of a folder under what all of Baton's tests run under."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    arguments = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
