"""A team of native threads, and the variant of the kernels it runs."""

from __future__ import annotations

import ctypes
import weakref
from functools import cache

from core.errors import ConfigError
from kernels.cpu.binding import library
from kernels.cpu.ledger import CoreLedger
from kernels.cpu.structs import ROWS_TOKENS, Instruction, Op, Step

_ENDED = 1 << 31


@cache
def variants() -> tuple[str, ...]:
    """Variants that this machine can run, best first."""
    native = library()
    names = [native.baton_variant_name(i).decode() for i in range(native.baton_num_variants())]
    return tuple(n for i, n in enumerate(names) if native.baton_variant_supported(i))


def _variant_index(name: str) -> int:
    native = library()
    names = [native.baton_variant_name(i).decode() for i in range(native.baton_num_variants())]
    if name not in variants():
        raise ConfigError(
            f"kernel variant: {name!r} does not run here; those that do: {', '.join(variants())}"
        )
    return names.index(name)


class Team:
    """Threads that run programs, one at a time. The calling thread is one of them."""

    def __init__(
        self, num_threads: int, variant: str = "", ledger: CoreLedger | None = None
    ) -> None:
        """variant: one of `variants()`; the best one where it is empty.

        ledger: what says how many of the threads have a core; without one all of them run.
        """
        self.variant = variant or variants()[0]
        self.num_threads = num_threads
        self._native = library()
        self._ledger = ledger  # the native team reads it for as long as it lives
        self._team = self._native.baton_team_create(
            num_threads, _variant_index(self.variant), ledger.handle if ledger else None
        )
        if not self._team:
            raise ConfigError(f"kernel backend: {num_threads} threads cannot be started")
        weakref.finalize(self, self._native.baton_team_destroy, self._team)

    def run(self, instructions: ctypes.Array[Instruction], count: int, step: Step) -> None:
        """Run the first `count` instructions on one step. The interpreter's lock is free meanwhile."""
        self._native.baton_run(self._team, instructions, count, ctypes.byref(step))

    def run_alone(self, op: Op, arguments: ctypes.Structure, num_rows: int) -> None:
        """Run one operation on `num_rows` rows. What `arguments` points to lives until this returns."""
        instruction = Instruction(op, ROWS_TOKENS, ctypes.addressof(arguments))
        self.run((Instruction * 1)(instruction), 1, Step(num_tokens=num_rows))

    def reset_mark(self) -> None:
        """Forget the last program's marks."""
        self._native.baton_set_mark(self._team, 0)

    def end_marks(self) -> None:
        """Tell who waits for marks that no more will come."""
        mark = self._native.baton_wait_mark(self._team, 0, 0)
        self._native.baton_set_mark(self._team, mark | _ENDED)

    def wait_mark(self, seen: int) -> tuple[int, bool]:
        """(the mark reached, 1 + layer; whether no more will come), once either is news. Any thread may wait."""
        mark: int = self._native.baton_wait_mark(self._team, seen, -1)
        return mark & ~_ENDED, bool(mark & _ENDED)
