"""The host backend: what `kernels.ops` calls when it runs on C++.

Operations run natively, one at a time or, recorded, a whole step of a model in one call. What adjusts a row of logits
before a token is chosen is the reference's: it touches the few ids that a request names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kernels import reference
from kernels.cpu.eager import Eager
from kernels.cpu.ledger import CoreLedger
from kernels.cpu.packing import pack
from kernels.cpu.self_test import choose, difference
from kernels.cpu.team import Team, variants
from kernels.weights import Weight

logger = logging.getLogger(__name__)


class HostBackend(Eager):
    """The operations of `kernels.ops` on a team of threads. Rows are float32."""

    name = "cpu"

    allow_only = staticmethod(reference.allow_only)
    ban = staticmethod(reference.ban)
    add_bias = staticmethod(reference.add_bias)
    penalise_repetition = staticmethod(reference.penalise_repetition)
    penalise_frequency = staticmethod(reference.penalise_frequency)

    def __init__(
        self,
        num_threads: int,
        variant: str = "",
        ledger: CoreLedger | None = None,
        judge: Callable[[str], str] = difference,
    ) -> None:
        """variant: one of `kernels.cpu.team.variants()`; where it is empty, the best that gives plain's bits.

        ledger: what it shares the machine's cores through; without one its threads always run.
        judge: see `kernels.cpu.self_test.choose`.
        """
        chosen, self._passed_over = choose((variant,) if variant else variants(), judge)
        if self._passed_over:
            logger.warning("host kernels: %s", self._passed_over)
        self.team = Team(num_threads, chosen, ledger)
        self._shares = " of shared cores" if ledger else ""
        super().__init__(self.team)

    @property
    def description(self) -> str:
        """For logs and health: the backend, its variant and threads, and better variants that were passed over."""
        faults = f"; {self._passed_over}" if self._passed_over else ""
        return f"cpu ({self.team.variant}, {self.team.num_threads} threads{self._shares}{faults})"

    def pack(self, weight: Weight) -> Weight:
        """See `kernels.ops.pack`."""
        return pack(weight)

    def pack_rows(self, weight: Weight) -> Weight:
        """See `kernels.ops.pack_rows`: products and look-ups read the same panels."""
        return pack(weight)
