"""The host kernels' tests on a build that ends the process at a wrong address or undefined arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.building import build_sanitized, runtime_path

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

FOLDER = Path(__file__).parent
FILES = [
    FOLDER / f"test_{name}.py"
    for name in (
        "rows",
        "products",
        "attention",
        "whole_attention",
        "program",
        "sampling",
        "blocks",
        "merging",
    )
]
FILES.append(FOLDER.parent / "test_host_memory.py")

WRONG_ADDRESS = """
import ctypes, sys, torch
from pathlib import Path
from kernels.cpu import binding
binding.use_library(Path(sys.argv[1]))
from kernels.cpu.backend import HostBackend
from kernels.kv_view import KVView
from kernels.step import StepMetadata
layer = KVView(torch.zeros(2, 1, 2, 16, 8))
beyond = StepMetadata(torch.tensor([2 * 16]), torch.zeros(1, 1, dtype=torch.int32), (0, 1), (1,))
HostBackend(1, sys.argv[2]).write_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), layer, beyond)
"""


VARIANTS = """
import sys
from pathlib import Path
from kernels.cpu import binding
binding.use_library(Path(sys.argv[1]))
from kernels.cpu.team import variants
print(*variants())
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sanitized(tmp_path_factory.mktemp("native"))


def run_python(reports: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the sanitizer's runtime loaded first; reports become files `reports.*`."""
    # Exceptions of C++ need their library before the sanitizer looks for it.
    preloaded = [str(runtime_path(name)) for name in ("libasan.so", "libstdc++.so.6")]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={reports}",  # the interpreter frees little at its end
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports}",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def reports_beside(path: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(path.parent.glob(f"{path.name}.*")))


def test_the_kernels_tests_pass_without_a_report(sanitized: Path, tmp_path: Path) -> None:
    reports = tmp_path / "report"
    # Many times slower, and beside other tests: how long one of them takes is this one's limit.
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=few", "--timeout=0"]
    command = ["-m", "pytest", *options, f"--native-library={sanitized}", *map(str, FILES)]
    done = run_python(reports, *command)
    report = reports_beside(reports)
    assert not report, report
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_the_variant_for_matrix_units_is_among_them(sanitized: Path, tmp_path: Path) -> None:
    """Also on a processor that has none: its tiles are in software, and all bits are compared."""
    done = run_python(tmp_path / "report", "-c", VARIANTS, str(sanitized))
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert names[-1] == "plain"
    assert ("amx" in names) == ("avx512" in names), names


@pytest.mark.parametrize("variant", ["avx2", "plain"])
def test_a_write_beyond_the_pool_is_reported(sanitized: Path, tmp_path: Path, variant: str) -> None:
    """The build that finds nothing above does find things."""
    reports = tmp_path / "report"
    done = run_python(reports, "-c", WRONG_ADDRESS, str(sanitized), variant)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in reports_beside(reports), done.stderr
