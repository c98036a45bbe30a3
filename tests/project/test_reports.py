"""A failed test is named, whatever is collected while its report is written."""

import subprocess
import sys
from pathlib import Path

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


def test_a_failure_is_reported_while_finalizers_parse(tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    arguments = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "FAILED" in run.stdout, run.stdout + run.stderr
    assert "test_named" in run.stdout
    assert "INTERNALERROR" not in run.stdout + run.stderr
    assert run.returncode == 1
