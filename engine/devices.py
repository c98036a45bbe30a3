"""Where a worker computes: the host, or the card that torch calls `cuda`.

Everything that has a meaning beside a card only is here: what is sent to it, waiting for it, memory that it reads by
itself. On the host each of these is nothing. A card runs what a thread has queued in order, on one stream, long after
the call that queued it has returned: what is queued behind a copy sees the copy, and only `wait_for` says that
something has happened.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError

HOST = torch.device("cpu")
_HOST_BACKENDS = ("cpu", "reference")


def choose_device(name: str, kernel_backend: str) -> torch.device:
    """The device that `--device` names; ConfigError where it is not there.

    `auto` is the card where torch sees one, unless the kernels that are asked for by name run on the host only.
    """
    has_card = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_card and kernel_backend not in _HOST_BACKENDS else "cpu"
    if name == "cuda" and not has_card:
        raise ConfigError("--device: 'cuda' cannot run here: torch sees no CUDA device")
    return torch.device(name)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`. The way to a card leads through page-locked memory and is queued: nobody waits."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Return when everything that this thread has queued on the device has run."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def lock_pages(memory: Tensor, device: torch.device) -> None:
    """Keep host memory where it is, so that a card copies to and from it by itself; all of it is taken at once.

    Raises RuntimeError where the machine has no room for it.
    """
    if device.type == "cuda":
        torch.cuda.check_error(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unlock_pages(memory: Tensor, device: torch.device) -> None:
    """Undo `lock_pages`, when what is queued has let go of the memory."""
    if device.type == "cuda":
        wait_for(device)
        torch.cuda.check_error(_runtime().cudaHostUnregister(memory.data_ptr()))


def _runtime() -> Any:
    """The CUDA runtime's own functions."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
