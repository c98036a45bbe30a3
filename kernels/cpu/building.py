"""How the native library is compiled: each source with its own flags, since each variant has its own instruction set.

`setup.py` makes what is installed with them; `build_sanitized` makes the same sources into a library that ends the
process with a report at a wrong address or undefined arithmetic, with matrix units in software. Only the standard
library is imported here: setup.py runs before anything is installed.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).parent / "native"

_LANGUAGE = [
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",  # variants must round alike: no multiply-add that the source does not name
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
OPTIMISED = ["-O3", "-g0", *_LANGUAGE]
_SANITIZED = [
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-address-use-after-scope",  # twice the time to compile, for code full of closures
    "-fno-sanitize-recover=all",
    "-DBATON_SOFT_TILES",  # the variant for matrix units runs on a processor that has none
    *_LANGUAGE,
]

_AVX512 = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512vnni",
    "-mavx2",
    "-mfma",
    "-mf16c",
]
_INSTRUCTION_SETS: dict[str, list[str]] = {
    "variant_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "variant_avx512.cpp": [*_AVX512, "-mprefer-vector-width=512"],
    "variant_amx.cpp": [*_AVX512, "-mprefer-vector-width=512", "-mamx-tile", "-mamx-int8"],
}


def source_names() -> list[str]:
    """Every source of the library."""
    return sorted(path.name for path in NATIVE.glob("*.cpp"))


def own_flags(source_name: str) -> list[str]:
    """What one source needs beyond the flags that all share."""
    return _INSTRUCTION_SETS.get(source_name, [])


def build_sanitized(folder: Path, compiler: str = "c++") -> Path:
    """Compile every source into `folder` and link them; the library made. Raises CalledProcessError."""

    def compile_one(source: str) -> str:
        made = str(folder / f"{source}.o")
        _run(compiler, *_SANITIZED, *own_flags(source), "-c", str(NATIVE / source), "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, source_names()))
    library = folder / "native_sanitized.so"
    _run(compiler, *_SANITIZED, "-shared", *objects, "-o", str(library))
    return library


def runtime_path(name: str, compiler: str = "c++") -> Path:
    """Where the compiler keeps a library that must be in a process before all others, such as `libasan.so`."""
    return Path(_run(compiler, f"-print-file-name={name}").strip())


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout
