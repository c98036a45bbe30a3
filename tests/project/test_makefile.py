"""Make: the targets there are, quick when nothing changed, and signals that reach the cluster."""

import os
import pathlib
import re
import signal
import subprocess
import time

import psutil
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TARGETS = ["help", "serve", "test", "test-fast", "test-system", "lint", "fmt", "bench"]
TARGETS += ["gpu-check", "proto"]


def make(*arguments, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.Popen(
        ["make", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_signals,
        **options,
    )


def heed_signals():
    """Signals that whoever runs the tests ignores, as under nohup, would be ignored by what they start."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def make_environment(folder, program):
    """A finished environment whose `baton` is a shell script."""
    (folder / "bin").mkdir(parents=True)
    baton = folder / "bin" / "baton"
    baton.write_text(f"#!/bin/sh\n{program}\n")
    baton.chmod(0o755)
    for stamp in (".run", ".dev"):
        (folder / stamp).touch()
    return f"VENV={folder}"


def test_help_lists_every_target():
    with make("help") as process:
        output, _ = process.communicate(timeout=20)
    assert re.findall(r"make (\S+)", output) == [*TARGETS[:8], "bench-%", *TARGETS[8:]]


def test_help_is_the_default():
    with make() as process:
        output, _ = process.communicate(timeout=20)
    assert "list the targets" in output


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_a_recipe(tmp_path, name):
    with make("-n", name, make_environment(tmp_path / "venv", "true")) as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output
    assert "environment.py" not in output  # the environment is up to date


def test_serve_passes_port_and_arguments(tmp_path):
    venv = make_environment(tmp_path / "venv", 'echo "[$@]"')
    with make("serve", venv, "PORT=8123", "ARGS=--mixed 1") as process:
        output, _ = process.communicate(timeout=20)
    assert output.strip() == "[up --port 8123 --mixed 1]"


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, True)],
)
def test_a_signal_ends_the_cluster_with_make(tmp_path, number, whole_group):
    venv = make_environment(tmp_path / "venv", "echo $$; exec sleep 60")
    with make("serve", venv, start_new_session=True) as process:
        baton = psutil.Process(int(process.stdout.readline()))
        assert baton.ppid() == process.pid  # no shell in between that could swallow a signal
        (os.killpg if whole_group else os.kill)(process.pid, number)
        process.wait(timeout=20)
    deadline_s = time.monotonic() + 5
    while baton.is_running() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not baton.is_running()


@pytest.mark.parametrize(("status", "ends_with"), [(0, 0), (1, 2), (5, 0)])
def test_no_system_test_is_no_failure(tmp_path, status, ends_with):
    venv = make_environment(tmp_path / "venv", "true")
    replace_python(tmp_path / "venv", f"exit {status}")
    with make("test-system", venv) as process:
        process.communicate(timeout=20)
    assert process.returncode == ends_with


@pytest.mark.parametrize(
    ("beside", "clusters", "ends_with"), [(0, 0, 0), (1, 0, 2), (0, 1, 2), (1, 1, 2)]
)
def test_all_tests_run_in_two_parts_and_either_fails_the_run(tmp_path, beside, clusters, ends_with):
    venv = make_environment(tmp_path / "venv", "true")
    called = replace_python(
        tmp_path / "venv", f'case "$*" in *" -n "*) exit {beside};; *) exit {clusters};; esac'
    )
    with make("test", venv) as process:
        process.communicate(timeout=20)
    assert process.returncode == ends_with
    first, second = called.read_text().splitlines()
    assert "-m not e2e and not system" in first
    assert "-m e2e and not system" in second


@pytest.mark.parametrize(
    ("target", "marks"),
    [("test", "not system"), ("test-fast", "not e2e and not system"), ("test-system", "system")],
)
def test_what_is_named_runs_in_one_process(tmp_path, target, marks):
    venv = make_environment(tmp_path / "venv", "true")
    called = replace_python(tmp_path / "venv", "exit 0")
    with make(target, venv, "ARGS=tests/core -k blocks") as process:
        process.communicate(timeout=20)
    assert process.returncode == 0
    assert called.read_text() == f"-m pytest -q -m {marks} tests/core -k blocks\n"


def replace_python(folder, program):
    """A Python that notes what it was called with, and then runs a program of the shell; where it notes."""
    called, python = folder / "called", folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {called}\n{program}\n')
    python.chmod(0o755)
    return called


def test_a_missing_python_is_named(tmp_path):
    with make("test", f"VENV={tmp_path}", "PYTHON=no-such-python") as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "Baton needs Python 3.11 or newer" in output
