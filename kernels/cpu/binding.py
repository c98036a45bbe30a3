"""The native library as ctypes sees it.

It is built when the package is installed; where that was not possible `find_library` says so and nothing here works.
Calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path

from core.errors import ConfigError
from kernels.cpu.structs import STRUCTS, Instruction, Step

_named: Path | None = None


def use_library(path: Path) -> None:
    """Take the build at `path` instead of the installed one. Before anything is loaded."""
    global _named
    assert library.cache_info().currsize == 0, "no other build is loaded yet"
    _named = path


def find_library() -> Path | None:
    """The library that was named, or else the one built beside this file, if there is one."""
    if _named is not None:
        return _named
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    return found[0] if found else None


@cache
def library() -> ctypes.CDLL:
    """The loaded library with its functions typed. Raises ConfigError where it is missing or of another build."""
    path = find_library()
    if path is None:
        raise ConfigError(
            "kernel backend: cpu is not built; it needs a C++ compiler when Baton is installed"
        )
    loaded = ctypes.CDLL(str(path))
    try:
        _type_functions(loaded)
    except AttributeError as error:
        raise ConfigError(
            f"kernel backend: {path.name} is of another build ({error}); install Baton again"
        ) from error
    _check_structs(loaded, path)
    return loaded


def _type_functions(loaded: ctypes.CDLL) -> None:
    loaded.baton_num_variants.restype = c_int32
    loaded.baton_variant_name.argtypes, loaded.baton_variant_name.restype = [c_int32], c_char_p
    loaded.baton_variant_supported.argtypes = [c_int32]
    loaded.baton_variant_supported.restype = c_int32
    loaded.baton_struct_bytes.argtypes, loaded.baton_struct_bytes.restype = [c_char_p], c_int64
    loaded.baton_team_create.argtypes = [c_int32, c_int32, c_void_p]
    loaded.baton_team_create.restype = c_void_p
    loaded.baton_team_destroy.argtypes, loaded.baton_team_destroy.restype = [c_void_p], None
    loaded.baton_ledger_open.argtypes = [c_char_p, c_int32, c_int32, c_char_p, c_int32]
    loaded.baton_ledger_open.restype = c_void_p
    loaded.baton_ledger_sweep.argtypes, loaded.baton_ledger_sweep.restype = [c_char_p], None
    for call in (
        loaded.baton_ledger_close,
        loaded.baton_ledger_claim,
        loaded.baton_ledger_release,
    ):
        call.argtypes, call.restype = [c_void_p], None
    loaded.baton_ledger_grant.argtypes = [c_void_p]
    loaded.baton_ledger_grant.restype = c_int32
    loaded.baton_run.argtypes = [c_void_p, POINTER(Instruction), c_int64, POINTER(Step)]
    loaded.baton_run.restype = None
    loaded.baton_wait_mark.argtypes = [c_void_p, c_uint32, c_int32]
    loaded.baton_wait_mark.restype = c_uint32
    loaded.baton_copy_runs.argtypes = [*[c_void_p] * 4, c_int64, c_int64, c_void_p, c_int32]
    loaded.baton_copy_runs.restype = None
    loaded.baton_checksum_runs.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32]
    loaded.baton_checksum_runs.restype = None
    loaded.baton_checksum.argtypes = [c_void_p, c_int64, c_uint32]
    loaded.baton_checksum.restype = c_uint32
    loaded.baton_num_checksum_ways.restype = c_int32
    loaded.baton_first_checksum_way.restype = c_int32
    loaded.baton_set_mark.argtypes, loaded.baton_set_mark.restype = [c_void_p, c_uint32], None


def _check_structs(loaded: ctypes.CDLL, path: Path) -> None:
    for name, struct in STRUCTS.items():
        native = loaded.baton_struct_bytes(name.encode())
        if native != ctypes.sizeof(struct):
            raise ConfigError(
                f"kernel backend: {path.name} is of another build ({name} has {native} bytes, "
                f"{ctypes.sizeof(struct)} expected); install Baton again"
            )
