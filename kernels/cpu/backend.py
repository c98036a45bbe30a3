"""The host backend: what `kernels.ops` calls when it runs on C++.

Model operations run natively, one at a time or, recorded, a whole step in one call. What the sampler does to a row of
logits is the reference's: it is a small part of a step.
"""

from __future__ import annotations

from kernels import reference
from kernels.cpu.eager import Eager
from kernels.cpu.host_program import HostProgram
from kernels.cpu.packing import pack
from kernels.cpu.team import Team
from kernels.recording import Recording
from kernels.weights import Weight


class HostBackend(Eager):
    """The operations of `kernels.ops` on a team of threads. Rows are float32."""

    name = "cpu"

    argmax = staticmethod(reference.argmax)
    uniforms = staticmethod(reference.uniforms)
    draw = staticmethod(reference.draw)
    allow_only = staticmethod(reference.allow_only)
    ban = staticmethod(reference.ban)
    add_bias = staticmethod(reference.add_bias)
    penalise_repetition = staticmethod(reference.penalise_repetition)
    penalise_frequency = staticmethod(reference.penalise_frequency)
    log_normalisers = staticmethod(reference.log_normalisers)
    row_logprobs = staticmethod(reference.row_logprobs)
    copy_blocks = staticmethod(reference.copy_blocks)
    gather_blocks = staticmethod(reference.gather_blocks)
    scatter_blocks = staticmethod(reference.scatter_blocks)
    convert_kv = staticmethod(reference.convert_kv)
    merge_partials = staticmethod(reference.merge_partials)

    def __init__(self, num_threads: int, variant: str = "") -> None:
        """variant: one of `kernels.cpu.team.variants()`; the best one where it is empty."""
        self.team = Team(num_threads, variant)
        super().__init__(self.team)

    @property
    def description(self) -> str:
        """For logs and health: the backend, its variant and threads."""
        return f"cpu ({self.team.variant}, {self.team.num_threads} threads)"

    def pack(self, weight: Weight) -> Weight:
        """See `kernels.ops.pack`."""
        return pack(weight)

    def pack_rows(self, weight: Weight) -> Weight:
        """See `kernels.ops.pack_rows`: products and look-ups read the same panels."""
        return pack(weight)

    def compile_step(self, recording: Recording) -> HostProgram:
        """See `kernels.ops.compile_step`."""
        return HostProgram(recording, self.team)
