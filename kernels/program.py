"""A model's step as one thing to run, and the seam between a running step and those who wait for parts of it.

A step's operations are marked layer by layer. Progress hears each mark while the step still runs, on the thread that
runs it, so finished layers can leave for another worker before the last one is computed. It never stores a mark:
what a listener does with it is the listener's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from kernels.recording import StepFunction
from kernels.step import StepMetadata


class Progress:
    """Where the running step's marks go. One a process: a process runs one step at a time."""

    def __init__(self) -> None:
        self.on_mark: Callable[[int], None] | None = None

    def mark(self, layer: int) -> None:
        """The KV of `layer` in this step is in the pool.

        On a card both are queued: whoever reads the KV by another way than the card's own queue waits for it first.
        """
        if self.on_mark is not None:
            self.on_mark(layer)

    @contextmanager
    def listening(self, on_mark: Callable[[int], None] | None) -> Iterator[None]:
        """Send the marks of the enclosed step to `on_mark`, and to nobody afterwards."""
        self.on_mark = on_mark
        try:
            yield
        finally:
            self.on_mark = None


progress = Progress()
"""The process's own."""


class StepProgram(Protocol):
    """A step of one model, ready to run on the backend it was made for."""

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: StepMetadata,
        wanted: Tensor,
        on_mark: Callable[[int], None] | None = None,
    ) -> Tensor:
        """The step's result `[R, width]` for rows `wanted [R]` of tokens `[T]`; valid until the next call.

        on_mark(layer) is called for each mark, in order, while the step runs, perhaps on another thread; every call
        has ended when run returns.
        """
        ...


class EagerProgram:
    """Calls the step's function: its operations run one after another as they are called."""

    def __init__(self, function: StepFunction) -> None:
        self._function = function

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: StepMetadata,
        wanted: Tensor,
        on_mark: Callable[[int], None] | None = None,
    ) -> Tensor:
        """See StepProgram.run; marks come on the calling thread."""
        with progress.listening(on_mark):
            return self._function(token_ids, positions, metadata, wanted)
