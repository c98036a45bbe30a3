"""Builds the host kernels when Baton is installed; everything else is in pyproject.toml.

The flags are in kernels/cpu/building.py. Without a compiler, or on another machine than x86-64, the install goes on
without the host kernels and the engine runs its torch reference.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # an isolated build does not look here by itself

from kernels.cpu.building import OPTIMISED, own_flags, source_names

NATIVE = Path("kernels/cpu/native")  # relative: setuptools wants its sources so


class BuildNative(build_ext):
    """Compiles each source with its own flags and links them to one library."""

    def build_extension(self, ext: Extension) -> None:
        """See setuptools."""

        def compile_one(source: str) -> list[str]:
            flags = [*OPTIMISED, *own_flags(Path(source).name)]
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
    sources = [str(NATIVE / name) for name in source_names()]
    depends = [str(path) for path in sorted(NATIVE.glob("*.[hi]*"))]
    return [
        Extension("kernels.cpu._native", sources, depends=depends, language="c++", optional=True)
    ]


setup(ext_modules=native_kernels(), cmdclass={"build_ext": BuildNative})
