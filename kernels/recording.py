"""Records which operations a model calls, on which tensors, without computing anything.

A model is run once with small sample inputs while the recorder stands in for a backend. Each operation answers with an
empty tensor of the right shape; a tensor is known by its memory, so views and slices of results may be passed on, while
a result of anything that is not an operation of `kernels.ops` is refused. Rows are symbolic: a tensor has one row for
each token of a step, or one for each wanted row, and the samples differ in these two numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.kv_view import KVView
from kernels.step import StepMetadata
from kernels.weights import Weight

SAMPLE_TOKENS, SAMPLE_WANTED = 5, 3


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One operation. arguments by the names of `kernels.ops`; results in order."""

    name: str
    arguments: dict[str, Any]
    results: tuple[Tensor, ...]


@dataclass(slots=True, eq=False)
class Recording:
    """A model's step as calls.

    token_ids, positions, wanted: the sample inputs, by which calls name the step's own.
    output: the last result, one row for each wanted row.
    """

    token_ids: Tensor
    positions: Tensor
    wanted: Tensor
    calls: list[Call] = field(default_factory=list)
    output: Tensor = field(default_factory=lambda: torch.empty(0))


class Recorder:
    """A backend that computes nothing and remembers everything; it keeps all tensors alive, so memory names them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def _note(self, name: str, results: tuple[Tensor, ...] = (), **arguments: Any) -> None:
        self.calls.append(Call(name, arguments, results))

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """See `kernels.ops.embedding`."""
        result = torch.empty(token_ids.shape[0], weight.shape[1])
        self._note("embedding", (result,), token_ids=token_ids, weight=weight)
        return result

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `kernels.ops.rms_norm`."""
        result = torch.empty(hidden.shape)
        self._note("rms_norm", (result,), hidden=hidden, weight=weight, epsilon=epsilon)
        return result

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.ops.add_rms_norm`; the sum takes the memory of `residual`."""
        normed = torch.empty(hidden.shape)
        arguments = {"hidden": hidden, "residual": residual, "weight": weight, "epsilon": epsilon}
        self._note("add_rms_norm", (normed, residual), **arguments)
        return normed, residual

    def linear(self, inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See `kernels.ops.linear`."""
        result = torch.empty(inputs.shape[0], weight.shape[0])
        self._note("linear", (result,), inputs=inputs, weight=weight, bias=bias)
        return result

    def rope_angles(
        self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.ops.rope_angles`."""
        shape = (positions.shape[0], frequencies.shape[0])
        cos, sin = torch.empty(shape), torch.empty(shape)
        arguments = {"positions": positions, "frequencies": frequencies, "factor": factor}
        self._note("rope_angles", (cos, sin), **arguments)
        return cos, sin

    def rope(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `kernels.ops.rope`."""
        result = torch.empty(heads.shape)
        self._note("rope", (result,), heads=heads, cos=cos, sin=sin)
        return result

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `kernels.ops.silu_mul`."""
        return self._gated("silu_mul", gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `kernels.ops.gelu_mul`."""
        return self._gated("gelu_mul", gate_up)

    def _gated(self, name: str, gate_up: Tensor) -> Tensor:
        result = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._note(name, (result,), gate_up=gate_up)
        return result

    def write_kv(self, key: Tensor, value: Tensor, layer: KVView, metadata: StepMetadata) -> None:
        """See `kernels.ops.write_kv`."""
        self._note("write_kv", key=key, value=value, layer=layer)

    def paged_attention(
        self,
        query: Tensor,
        layer: KVView,
        metadata: StepMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `kernels.ops.paged_attention`."""
        result = torch.empty(query.shape)
        arguments = {"query": query, "layer": layer, "scale": scale, "window": window}
        self._note("paged_attention", (result,), **arguments, soft_cap=soft_cap, sinks=sinks)
        return result

    def take_rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """See `kernels.ops.take_rows`."""
        result = torch.empty(rows.shape[0], hidden.shape[1])
        self._note("take_rows", (result,), hidden=hidden, rows=rows)
        return result

    def mark(self, layer: int) -> None:
        """See `kernels.ops.mark`."""
        self._note("mark", layer=layer)


StepFunction = Callable[[Tensor, Tensor, StepMetadata, Tensor], Tensor]
"""(token_ids `[T]`, positions `[T]`, metadata, wanted rows `[R]`) -> `[R, width]`."""


def sample_recording() -> Recording:
    """The sample inputs of a recording that has not begun."""
    return Recording(
        token_ids=torch.zeros(SAMPLE_TOKENS, dtype=torch.int64),
        positions=torch.zeros(SAMPLE_TOKENS, dtype=torch.int64),
        wanted=torch.zeros(SAMPLE_WANTED, dtype=torch.int64),
    )


def sample_metadata() -> StepMetadata:
    """Metadata that no recorded operation looks into."""
    empty = torch.empty(0, dtype=torch.int64)
    return StepMetadata(empty, empty.to(torch.int32).view(0, 1), (0,), ())
