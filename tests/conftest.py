"""What every test runs under: one thread a process, no network for model files, no clock in property tests.

`make test` sets the same variables; setting them here too makes a bare `pytest` the same run. Child processes inherit
them.
"""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from services.cluster.ports import HeldPort

for name, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)
# Read when triton is first imported, which transformers does too: so it is chosen before any test module is.
if os.environ.get("BATON_KERNEL_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# Other processes share the cores: how long one example takes says nothing about the code.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")
# For code that a sanitizer slows down; chosen by `--hypothesis-profile`.
settings.register_profile("few", settings.get_profile("baton"), max_examples=20)


_LEFT = pytest.StashKey[list[tuple[str, list[str]]]]()
_LEFT_IN_WORKER = "left_running"

NUM_SCHEDULES = 100
"""Random schedules of each kind that a plain run tests; `--schedules 10000` runs more."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-library", type=Path, help="a build of the host kernels to test")
    parser.addoption(
        "--schedules", type=int, default=NUM_SCHEDULES, help="random schedules of each kind to run"
    )
    parser.addoption("--first-schedule", type=int, default=0, help="seed of the first one")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `schedule` runs once for each seed; its id names the seed, which makes the same history."""
    if "schedule" in metafunc.fixturenames:
        first = metafunc.config.getoption("--first-schedule")
        count = metafunc.config.getoption("--schedules")
        metafunc.parametrize("schedule", range(first, first + count))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT] = []
    if path := config.getoption("--native-library"):
        from kernels.cpu.binding import use_library

        use_library(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Nothing is collected while a failure is written down.

    The report parses source. Until Python 3.13 a parse inside a parse (a finalizer that warns, or whose traceback is
    printed, run by a collection) breaks the outer one with "AST constructor recursion depth mismatch"; pytest then
    ends as a whole and never names the test that failed.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def _reference_kernels() -> Iterator[None]:
    """A test that puts another backend in use, or gives torch more threads, leaves neither to the next one."""
    torch = sys.modules.get("torch")
    num_threads = torch.get_num_threads() if torch else None
    yield
    if torch and num_threads:
        torch.set_num_threads(num_threads)
    if "kernels.ops" in sys.modules:
        from kernels import ops, reference

        ops.use_backend(reference)


def _movers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Movers that a test has left running fail the run; the interpreter would wait for them for ever.

    With `-n` tests run in workers, and the status that counts is that of the process which started them.
    """
    left = [f"{name} in {node}" for node, names in session.config.stash[_LEFT] for name in names]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_LEFT_IN_WORKER] = _movers()
    else:
        left += _movers()
    if left:
        session.exitstatus = 1
        print(f"\nleft running: {', '.join(left)}", file=sys.__stderr__)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker is done; one that died has told nothing, and is a failure anyway."""
    names = getattr(node, "workeroutput", {}).get(_LEFT_IN_WORKER, [])
    node.config.stash[_LEFT].append((node.gateway.id, names))


def pytest_unconfigure(config: pytest.Config) -> None:
    """After the summary: no wait for what was told above."""
    if _movers():
        os._exit(1)


@pytest.fixture
def held_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 that refuses connections until the test starts a server there, as often as it likes."""
    with contextlib.closing(HeldPort()) as held:
        yield held.port
