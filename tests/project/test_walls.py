"""The gateway's packages import where nothing of torch, and nothing of a worker, can be imported.

import-linter reads the source; this runs it, so that a lazy import at module level or a plugin cannot slip through.
"""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TENSORS = ("torch", "numpy", "triton", "gguf", "safetensors", "transformers", "lmcache")
WORKER = ("engine", "kernels", "kvtransfer")

IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

blocked, packages = sys.argv[1].split(","), sys.argv[2].split(",")

class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"the wall: {name}")

sys.meta_path.insert(0, Wall())

def names(package):
    module = importlib.import_module(package)
    yield package
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        # a program is not imported, and the native kernels are a library that no import loads
        if not found.name.endswith((".__main__", "._native")):
            yield found.name

imported = [importlib.import_module(name).__name__ for package in packages for name in names(package)]
print(len(imported))
"""


def import_all(packages, blocked):
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(blocked), ",".join(packages)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["core", "kvindex", "services.gateway", "services.rpc"])
def test_gateway_packages_import_without_torch_and_without_a_worker(package):
    result = import_all([package], TENSORS + WORKER)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 1


@pytest.mark.parametrize("package", ["services.cli", "services.config", "services.cluster"])
def test_the_command_line_imports_without_torch(package):
    result = import_all([package], TENSORS)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", ["core", "kernels", "kvtransfer", "kvindex", "engine"])
def test_only_services_needs_grpc_or_fastapi(package):
    result = import_all([package], ("grpc", "fastapi", "starlette", "uvicorn", "httpx", "services"))
    assert result.returncode == 0, result.stderr


def test_the_wall_stands():
    result = import_all(["engine"], ("engine",))
    assert result.returncode == 1
    assert "the wall: engine" in result.stderr
