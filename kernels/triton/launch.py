"""Where kernels run: on a card, in Triton's interpreter on host tensors, or nowhere, written down for a compiler.

Every launcher of this package starts its kernels through `launch`, so that what a launcher would run on a card can
be recorded without one (`recording`) and compiled ahead of time. Owns no memory and chooses no sizes: those are in
`kernels.triton.tuning`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from core.errors import ConfigError
from kernels.triton.cards import INTERPRETER, Card, card_of_capability

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 when this package was first used."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel start that was recorded instead of run.

    arguments: what the kernel takes at run time, tensors and numbers, in order.
    constants: its compile-time parameters by name.
    options: num_warps, num_stages and enable_fp_fusion.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


class _Recording:
    """The recording in progress, if any. One a process."""

    card: Card | None = None
    launches: list[Launch]


_recording = _Recording()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    num_warps: int = 4,
    num_stages: int = 1,
    fp_fusion: bool = True,
    **constants: Any,
) -> None:
    """Start `kernel` on `grid`. fp_fusion: whether a product and a sum may become one rounding."""
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fp_fusion}
    if _recording.card is not None:
        _recording.launches.append(Launch(kernel, arguments, constants, options))
    elif 0 not in grid:
        kernel[grid](*arguments, **constants, **options)


def current_card() -> Card:
    """The card that kernels are tuned for in this process."""
    return _recording.card if _recording.card is not None else _present_card()


def card_name() -> str:
    """What to call the card: its maker's name and its row of the tuning tables."""
    row = current_card().name
    return row if INTERPRETED else f"{torch.cuda.get_device_name()}, {row}"


@contextmanager
def recording(card: Card) -> Iterator[list[Launch]]:
    """Let launchers run as if on `card`, and collect what they would start; results hold anything."""
    _recording.card, _recording.launches = card, []
    try:
        yield _recording.launches
    finally:
        _recording.card = None


def default_device() -> torch.device:
    """Where tensors belong that follow from numbers of the host alone."""
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@cache
def _present_card() -> Card:
    if INTERPRETED:
        return INTERPRETER
    if not torch.cuda.is_available():
        raise ConfigError(
            "kernel backend: 'triton' needs a CUDA card; set TRITON_INTERPRET=1 to run it in the interpreter"
        )
    return card_of_capability(*torch.cuda.get_device_capability())
