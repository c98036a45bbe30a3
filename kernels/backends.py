"""Which code the operations of a process run on.

`auto` takes the fastest that is there and right for the precision asked for; a name takes that or refuses. Whatever is
chosen is returned with the reason, so that it can be logged and shown: nothing falls back in silence.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from core.errors import ConfigError
from kernels import reference

_NAMES = ("auto", "cpu", "reference", "triton")


@dataclass(frozen=True, slots=True, eq=False)
class BackendChoice:
    """A backend to be given to `kernels.ops.use_backend`.

    name: `cpu`, `reference` or `triton`.
    backend: the code.
    description: one phrase for logs and health: what runs and, where that was not asked for by name, why.
    keeps_blocks: whether quantised weights are best kept as they are.
    activation_dtype: what products with kept blocks round their inputs to, "" for nothing.
    kv_dtype: what KV beside kept blocks is held in unless asked otherwise, "" for the rows' own type.
    """

    name: str
    backend: Any
    description: str
    keeps_blocks: bool = False
    activation_dtype: str = ""
    kv_dtype: str = ""


def choose_backend(
    name: str,
    dtype: str,
    num_threads: int,
    variant: str = "",
    core_ledger: str = "none",
    device: str = "cpu",
) -> BackendChoice:
    """The backend for rows of `dtype`; ConfigError where the one that is named cannot run here.

    num_threads: of the host kernels; 0 takes every core that the ledger grants, one where there is no ledger.
    core_ledger: `auto`, `none` or a file, as `kernels.cpu.ledger.ledger_path` reads it.
    device: `cpu` or `cuda`, where tensors lie; there is one backend for cards, and it runs nowhere else.
    """
    if name not in _NAMES:
        raise ConfigError(f"--kernel-backend: {name!r} is unknown; known: {', '.join(_NAMES)}")
    if device == "cuda":
        if name not in ("auto", "triton"):
            raise ConfigError(
                f"--kernel-backend: {name!r} runs on --device cpu; --device is cuda here"
            )
        return _card()
    if name == "triton":
        raise ConfigError("--kernel-backend: 'triton' runs on --device cuda; --device is cpu here")
    if name == "reference":
        return BackendChoice("reference", reference, "reference (torch)")
    obstacle = _host_obstacle(dtype)
    if not obstacle:
        return _host(num_threads, variant, core_ledger)
    if name == "cpu":
        raise ConfigError(f"--kernel-backend: cpu cannot run: {obstacle}")
    return BackendChoice("reference", reference, f"reference (torch; the host kernels: {obstacle})")


def timed_alone(
    choice: BackendChoice, core_ledger: str, wait_s: float
) -> AbstractContextManager[bool]:
    """Inside, no other worker of the ledger times itself (`kernels.cpu.ledger.alone`); at once where none is shared."""
    from kernels.cpu.ledger import NONE, alone

    return alone(core_ledger if choice.name == "cpu" else NONE, wait_s)


def _card() -> BackendChoice:
    from kernels import triton

    try:
        triton.load()
    except ConfigError as error:
        raise ConfigError(f"--device: 'cuda' cannot run here: {error.message}") from None
    from kernels.triton.launch import card_name

    return BackendChoice("triton", triton, f"triton ({card_name()})", keeps_blocks=True)


def _host(num_threads: int, variant: str, core_ledger: str) -> BackendChoice:
    from kernels.cpu.backend import HostBackend
    from kernels.cpu.ledger import AUTO, CoreLedger, ledger_path, num_usable_cores

    path, ledger, obstacle = ledger_path(core_ledger), None, ""
    if path is not None:
        try:
            ledger = CoreLedger(path, num_threads or num_usable_cores())
        except ConfigError as error:
            if core_ledger != AUTO:
                raise
            obstacle = f"; {error.message}"
    # Threads of workers that do not know of each other get in each other's way: without a ledger one is safe.
    threads = num_threads or (num_usable_cores() if ledger else 1)
    backend = HostBackend(threads, variant, ledger)
    return BackendChoice("cpu", backend, backend.description + obstacle, True, "int16", "float16")


def _host_obstacle(dtype: str) -> str:
    """Why the host kernels cannot run, empty when they can."""
    from kernels.cpu.binding import find_library, library

    if dtype != "float32":
        return f"they compute in float32, --dtype is {dtype}"
    if find_library() is None:
        return "they were not built; they need a C++ compiler when Baton is installed"
    try:
        library()
    except (OSError, ConfigError) as error:
        return str(error)
    return ""
