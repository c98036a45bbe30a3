"""Builds the host kernels when Baton is installed; everything else is in pyproject.toml.

Each variant is compiled with its own instruction set, so the flags differ from file to file. Without a compiler, or on
another machine than x86-64, the install goes on without them and the engine runs its torch reference.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("kernels/cpu/native")
COMMON = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",  # variants must round alike: no multiply-add that the source does not name
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-g0",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
AVX512 = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512vnni",
    "-mavx2",
    "-mfma",
    "-mf16c",
]
FLAGS = {
    "variant_plain.cpp": [],
    "variant_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "variant_avx512.cpp": [*AVX512, "-mprefer-vector-width=512"],
    "variant_amx.cpp": [*AVX512, "-mprefer-vector-width=512", "-mamx-tile", "-mamx-int8"],
    "team.cpp": [],
    "plan.cpp": [],
    "library.cpp": [],
}


class BuildNative(build_ext):
    """Compiles each source with its own flags and links them to one library."""

    def build_extension(self, ext: Extension) -> None:
        """See setuptools."""

        def compile_one(source: str) -> list[str]:
            flags = [*COMMON, *FLAGS[Path(source).name]]
            return self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags, depends=ext.depends
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for names in pool.map(compile_one, ext.sources) for name in names]
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, target, extra_postargs=["-pthread"], target_lang="c++"
        )


def native_kernels() -> list[Extension]:
    """The one extension, where the machine is one it is written for."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    sources = [str(NATIVE / name) for name in FLAGS]
    depends = [str(path) for path in sorted(NATIVE.glob("*.[hi]*"))]
    return [
        Extension("kernels.cpu._native", sources, depends=depends, language="c++", optional=True)
    ]


setup(ext_modules=native_kernels(), cmdclass={"build_ext": BuildNative})
